"""flash-linear-attention's calls of KDA (fla.ops.kda of August 2026), computed by this engine.

Names, order and defaults are that library's. They differ from `kda_engine.forward` in this: g is the log decay unless
`use_gate_in_kernel`, beta the write strength unless `use_beta_sigmoid_in_kernel`, q and k keep their lengths unless
`use_qk_l2norm_in_kernel`, and the final state is handed out only on request.
"""

from dataclasses import replace

from ..api import backward, forward
from ..arrays import as_array
from ..errors import InputError
from ..misnamed import suggest_names
from ..options import Options


@suggest_names
def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
              use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
              lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False,
              cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, *, A_log=None, dt_bias=None, chunk_size=None,
              engine="auto"):
    """(out [B,T,HV,V] as v's type, final state [N,HV,K,V] float32, or float64 for float64 inputs, or None).

    q, k [B,T,H,K]; v [B,T,HV,V]; g [B,T,HV,K]; beta [B,T,HV]; initial_state [N,HV,K,V] ([N,HV,V,K] under
    state_v_first); cu_seqlens [N+1] with B = 1; A_log [HV]; dt_bias [HV*K] or [HV,K]; scale: None means 1/sqrt(K).
    NumPy, CuPy or anything with DLPack, which the results come back as; bfloat16, float16, float32 or float64.

    use_gate_in_kernel: g is raw; the log decay is lower_bound * sigmoid(exp(A_log) (g + dt_bias)) where lower_bound is
    given, in [-5, 0), and else -exp(A_log) softplus(g + dt_bias). allow_neg_eigval: beta becomes 2 sigmoid(beta).
    safe_gate, disable_recompute, chunk_size and cu_seqlens_cpu choose how that library computes; here they change
    nothing. engine: as in `kda_engine.forward`.

    A PyTorch tensor's graph ends here: gradients come from `chunk_kda_with_backward`.
    Raises InputError for what that library refuses, for return_intermediate_states and for cp_context.
    """
    return _run(save=False, **locals())[:2]


@suggest_names
def chunk_kda_with_backward(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                            use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
                            allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
                            return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
                            cp_context=None, *, A_log=None, dt_bias=None, chunk_size=None, engine="auto"):
    """(out, final state, pull): as `chunk_kda`, and a function for the gradients.

    pull(do, dht=None) gives the gradients of sum(out * do) + sum(final_state * dht) as `kda_engine.Gradients`; do
    [B,T,HV,V], dht as the final state. ddt_bias has the shape of dt_bias. Leave the inputs unchanged until then.
    """
    return _run(save=True, **locals())


@suggest_names
def fused_recurrent_kda(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None,
                        output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
                        use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False,
                        cu_seqlens=None, *, engine="auto"):
    """(out, final state or None): as `chunk_kda`, in the order of arguments of that library's decoding call."""
    return chunk_kda(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                     use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound=lower_bound,
                     state_v_first=state_v_first, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias, engine=engine)


def _run(*, save, q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
         use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, disable_recompute,
         return_intermediate_states, state_v_first, cu_seqlens, cu_seqlens_cpu, cp_context, A_log, dt_bias, chunk_size,
         engine):
    """(out, final state or None, pull), the last one of use after save=True only."""
    if return_intermediate_states:
        raise InputError("return_intermediate_states: expected False; this engine hands out final states")
    if cp_context is not None:
        raise InputError("cp_context: expected None; `kda-engine run` under mpirun cuts sequences over ranks")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise InputError("allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it, got False")
    if not use_gate_in_kernel:
        gate, A_log, dt_bias = {"gate": "log"}, None, None
    elif lower_bound is not None:
        gate = {"gate": "lower_bound", "lower_bound": lower_bound}
    elif safe_gate:
        raise InputError("lower_bound: expected a number in [-5, 0) with safe_gate and use_gate_in_kernel, got None")
    elif A_log is None:
        raise InputError("A_log: expected an array with use_gate_in_kernel and no lower_bound, got None")
    else:
        gate = {"gate": "softplus"}
    options = Options(beta="value" if not use_beta_sigmoid_in_kernel else "logit2" if allow_neg_eigval else "logit",
                      qk_l2norm=bool(use_qk_l2norm_in_kernel), scale=scale,
                      state_layout="VK" if state_v_first else "KV", **gate)
    bias = bias_shape = None
    if dt_bias is not None:
        bias = as_array("dt_bias", dt_bias)
        heads, size = as_array("v", v).shape[-2], as_array("k", k).shape[-1]
        if bias.shape not in ((heads * size,), (heads, size)):
            raise InputError(f"dt_bias: expected shape {(heads * size,)} or {(heads, size)}, got {bias.shape}")
        bias, bias_shape = bias.reshape(heads, size), bias.shape
    fwd = forward(q, k, v, g, beta, A_log=A_log, dt_bias=bias, initial_state=initial_state, cu_seqlens=cu_seqlens,
                  options=options, engine=engine, save=save)

    def pull(do, dht=None):
        gradients = backward(fwd, do, dht)
        if bias is None:
            return gradients
        return replace(gradients, ddt_bias=gradients.ddt_bias.reshape(bias_shape))

    return fwd.out, fwd.final_state if output_final_state else None, pull
