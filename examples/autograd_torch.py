"""The engine as an operator of PyTorch: `chunk_kda` for a model in training, with gradients for PyTorch's own backward.

    from autograd_torch import chunk_kda            # in place of: from fla.ops.kda import chunk_kda

Names and defaults are those of flash-linear-attention; tensors on the CPU go to the NumPy engine, on a GPU to the CUDA
engine, without a copy. Run by itself it trains the small model below for a few steps.
"""

import torch

from kda_engine.compat import chunk_kda_with_backward

TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


class _KDA(torch.autograd.Function):
    @staticmethod
    def forward(context, options, *tensors):
        given = {name: x.detach() for name, x in zip(TENSORS, tensors) if x is not None}
        out, state, context.pull = chunk_kda_with_backward(**given, **options, output_final_state=True)
        context.given = given
        return out, state

    @staticmethod
    def backward(context, do, dht):
        gradients = context.pull(do.contiguous(), dht.contiguous())
        found = {name: getattr(gradients, "d_initial_state" if name == "initial_state" else f"d{name}")
                 for name in context.given}
        # A gradient has its tensor's type; those of parameters and states come in float32.
        return None, *(None if found.get(name) is None else found[name].to(context.given[name].dtype)
                       for name in TENSORS)


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, A_log=None, dt_bias=None,
              **options):
    """(out, final state or None), part of PyTorch's graph; arguments as of `kda_engine.compat.chunk_kda`."""
    if not options.get("use_gate_in_kernel"):
        A_log = dt_bias = None
    out, state = _KDA.apply({"scale": scale, **options}, q, k, v, g, beta, A_log, dt_bias, initial_state)
    return out, state if output_final_state else None


def main():
    import torch_kda

    torch.manual_seed(0)
    # The model's operator is the token recurrence in PyTorch; here the engine stands in its place.
    torch_kda.recurrent_kda = chunk_kda
    model = torch_kda.KimiDeltaAttention()
    x, wanted = torch.randn(2, 100, 32), torch.randn(2, 100, 32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(5):
        loss = (model(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
