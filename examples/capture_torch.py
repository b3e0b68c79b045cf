"""Captures what a KDA layer of a PyTorch model feeds its operator, as a file for `kda-engine input --from`.

A layer's q, k, v, gate and beta exist only between its projections and the operator it calls, where no module hook
sees them. So the hook stands in the operator's place, in the module that the layer looks it up in:

    with Capture("fla.layers.kda", "chunk_kda") as capture:      # flash-linear-attention
        model(tokens).loss.backward()
    capture.save("layer3.safetensors", call=3)

Run by itself it does so with the small model below.
"""

import argparse
import importlib
import inspect

import numpy as np
import torch

TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")


class Capture:
    """A context manager; calls: one dict a call of the operator, {"tensors": by name, "options": texts by name}.

    The gradient that reaches the operator's output becomes the tensor "d_out" of its call.
    """

    def __init__(self, module, operator):
        self._module, self._name = importlib.import_module(module), operator
        self.calls = []

    def __enter__(self):
        self._operator = getattr(self._module, self._name)
        setattr(self._module, self._name, self._stand_in)
        return self

    def __exit__(self, *_):
        setattr(self._module, self._name, self._operator)

    def save(self, path, call=0):
        """Write one call's tensors; path: *.npz or *.safetensors."""
        tensors, options = self.calls[call]["tensors"], self.calls[call]["options"]
        if str(path).endswith(".safetensors"):
            from safetensors.torch import save_file

            save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata=options)
        else:
            np.savez(path, **{name: _array(x) for name, x in tensors.items()},
                     **{f"option.{name}": text for name, text in options.items()})

    def _stand_in(self, *args, **kwargs):
        bound = inspect.signature(self._operator).bind(*args, **kwargs)
        bound.apply_defaults()
        given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        result = self._operator(*args, **kwargs)
        tensors = {name: given[name].detach().cpu() for name in TENSORS if given.get(name) is not None}
        if "dt_bias" in tensors:
            tensors["dt_bias"] = tensors["dt_bias"].view(given["g"].shape[2:])
        self.calls.append({"tensors": tensors, "options": _options(given)})
        if result[0].requires_grad:
            result[0].register_hook(lambda gradient: tensors.update(d_out=gradient.detach().cpu()))
        return result


def _options(given):
    """The operator's switches as the engine's options; texts by name."""
    bounded = given.get("lower_bound") is not None
    options = {
        "gate": ("lower_bound" if bounded else "softplus") if given.get("use_gate_in_kernel") else "log",
        "beta": ("logit2" if given.get("allow_neg_eigval") else "logit") if given.get("use_beta_sigmoid_in_kernel")
                else "value",
        "qk_l2norm": "1" if given.get("use_qk_l2norm_in_kernel") else "0",
        "state_layout": "VK" if given.get("state_v_first") else "KV",
    }
    optional = {"lower_bound": given.get("lower_bound"), "scale": given.get("scale")}
    return options | {name: repr(float(value)) for name, value in optional.items() if value is not None}


def _array(x):
    """A tensor as NumPy has it; bfloat16 as two bytes without a meaning, which is how npz files keep it."""
    return x.contiguous().view(torch.int16).numpy().view("V2") if x.dtype == torch.bfloat16 else x.numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", metavar="OUT.npz|OUT.safetensors")
    parser.add_argument("--layer", type=int, default=1, help="which of the model's layers (1)")
    args = parser.parse_args()
    from torch_kda import KimiDeltaAttention

    torch.manual_seed(0)
    model = torch.nn.Sequential(KimiDeltaAttention(), KimiDeltaAttention())
    with Capture("torch_kda", "recurrent_kda") as capture:
        model(torch.randn(2, 50, 32)).square().mean().backward()
    capture.save(args.output, args.layer)
    held = ", ".join(f"{name} {list(x.shape)}" for name, x in capture.calls[args.layer]["tensors"].items())
    print(f"{args.output}: layer {args.layer}: {held}")


if __name__ == "__main__":
    main()
