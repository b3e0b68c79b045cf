"""Kimi Delta Attention token by token in plain PyTorch, called as flash-linear-attention's `chunk_kda` is."""

import torch
from torch.nn import functional as F


def recurrent_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                  use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
                  allow_neg_eigval=False, safe_gate=False, lower_bound=None, state_v_first=False, cu_seqlens=None,
                  A_log=None, dt_bias=None):
    """(out [B,T,HV,V] as q's type, final state [N,HV,K,V] float32, or float64 for float64 inputs, or None).

    q, k [B,T,H,K]; v [B,T,HV,V]; g [B,T,HV,K]; beta [B,T,HV]; A_log [HV]; dt_bias [HV*K]; initial_state [N,HV,K,V]
    ([N,HV,V,K] with state_v_first). Differentiable, slow, and right: the thing to check other code with by hand.
    """
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    wide = [x.to(dtype) for x in (q, k, v, g, beta)]
    queries, keys, values, decay, strength = wide
    if use_qk_l2norm_in_kernel:
        queries, keys = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (queries, keys))
    if use_gate_in_kernel:
        rate = 1.0 if A_log is None else A_log.to(dtype).exp()[:, None]
        shifted = decay if dt_bias is None else decay + dt_bias.to(dtype).view(HV, K)
        decay = lower_bound * torch.sigmoid(rate * shifted) if lower_bound is not None else -rate * F.softplus(shifted)
    if use_beta_sigmoid_in_kernel:
        strength = torch.sigmoid(strength) * (2.0 if allow_neg_eigval else 1.0)
    queries, keys = (x.repeat_interleave(HV // H, dim=2) for x in (queries, keys))
    queries = queries * (K**-0.5 if scale is None else scale)

    spans = [(b, 0, T) for b in range(B)]
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        spans = [(0, start, stop) for start, stop in zip(bounds[:-1], bounds[1:])]
    rows, finals = [], []
    for number, (b, start, stop) in enumerate(spans):
        state = torch.zeros(HV, K, V, dtype=dtype, device=q.device)
        if initial_state is not None:
            state = initial_state[number].to(dtype)
            state = state.transpose(1, 2) if state_v_first else state
        for t in range(start, stop):
            state = decay[b, t].exp()[:, :, None] * state
            write = strength[b, t][:, None] * (values[b, t] - torch.einsum("hkv,hk->hv", state, keys[b, t]))
            state = state + keys[b, t][:, :, None] * write[:, None, :]
            rows.append(torch.einsum("hkv,hk->hv", state, queries[b, t]))
        finals.append(state.transpose(1, 2) if state_v_first else state)
    out = torch.stack(rows).view(B, T, HV, V).to(q.dtype) if rows else values.to(q.dtype)
    return out, torch.stack(finals) if output_final_state else None


class KimiDeltaAttention(torch.nn.Module):
    """The smallest layer around the operator: projections in, operator, projection out. x [B,T,width]."""

    def __init__(self, width=32, heads=2, size=16):
        super().__init__()
        self.heads, self.size = heads, size
        linear = lambda out: torch.nn.Linear(width, out, bias=False)
        self.q, self.k, self.v, self.g = (linear(heads * size) for _ in range(4))
        self.beta, self.out = linear(heads), torch.nn.Linear(heads * size, width, bias=False)
        self.A_log = torch.nn.Parameter(torch.linspace(0, 1, heads))
        self.dt_bias = torch.nn.Parameter(torch.linspace(-4, -2, heads * size))

    def forward(self, x):
        split = lambda y: y.view(*x.shape[:2], self.heads, self.size)
        out, _ = recurrent_kda(
            split(self.q(x)), split(self.k(x)), split(self.v(x)), split(self.g(x)), self.beta(x), A_log=self.A_log,
            dt_bias=self.dt_bias, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True)
        return x + self.out(out.flatten(2))
