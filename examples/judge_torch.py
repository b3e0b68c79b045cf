"""Runs another implementation of KDA on a golden and writes what it gives, for `kda-engine golden check --output`.

    python examples/judge_torch.py data/ordinary-bfloat16.h5 out.h5
    kda-engine golden check --output out.h5 data/ordinary-bfloat16.h5

    python examples/judge_torch.py data outputs            # a folder of goldens, a folder of outputs
    kda-engine golden check --outputs outputs data

The operator is flash-linear-attention's `chunk_kda`, or another that takes the same arguments.
"""

import argparse
import importlib
from pathlib import Path

import torch

from kda_engine.hdf5.golden import read_golden
from kda_engine.hdf5.results import write_results

PER_TOKEN = ("q", "k", "v", "g", "beta")


def results_of(golden, operator, device):
    """All results of a `Golden` by dataset name, NumPy arrays; operator: called as `chunk_kda`."""
    case, options = golden.case, golden.case.options
    if case.conv is not None:
        raise SystemExit(f"{golden.path}: holds a short convolution, which this example leaves out")
    leaf = lambda x: _tensor(x).to(device).requires_grad_()
    tensors = {name: leaf(getattr(case, name)) for name in (*PER_TOKEN, "A_log", "dt_bias")
               if getattr(case, name) is not None}
    # Zeros where the golden has none: it holds the gradient of the initial state all the same.
    state = golden.results["outputs/final_state"]
    states = {name: _tensor(state * 0 if getattr(case, name) is None else getattr(case, name)).to(device)
              for name in ("initial_state", "d_final_state")}
    initial = states["initial_state"].requires_grad_()
    batch = {name: tensors[name][None] for name in PER_TOKEN}
    flat_bias = tensors["dt_bias"].flatten() if "dt_bias" in tensors else None
    out, final_state = operator(
        **batch, scale=options.scale_for(case.q.shape[2]), initial_state=initial, output_final_state=True,
        use_qk_l2norm_in_kernel=options.qk_l2norm, use_gate_in_kernel=options.gate != "log",
        use_beta_sigmoid_in_kernel=options.beta != "value", allow_neg_eigval=options.beta == "logit2",
        safe_gate=options.gate == "lower_bound",
        lower_bound=options.lower_bound if options.gate == "lower_bound" else None,
        state_v_first=options.state_layout == "VK", cu_seqlens=torch.tensor(case.cu_seqlens, device=device),
        A_log=tensors.get("A_log"), dt_bias=flat_bias)
    results = {"outputs/out": out[0], "outputs/final_state": final_state}
    if case.d_out is not None:
        torch.autograd.backward([out, final_state], [_tensor(case.d_out).to(device)[None].to(out.dtype),
                                                     states["d_final_state"].to(final_state.dtype)])
        results |= {f"grads/d{name}": x.grad for name, x in tensors.items()}
        results["grads/d_initial_state"] = initial.grad
    return {name: _array(x) for name, x in results.items()}


def _tensor(x):
    # PyTorch reads no bfloat16 from NumPy; the bits travel as 16-bit integers.
    return torch.from_numpy(x.view("i2").copy()).view(torch.bfloat16) if x.dtype == "bfloat16" else torch.tensor(x)


def _array(x):
    x = x.detach().cpu().contiguous()
    return x.view(torch.int16).numpy().view("bfloat16") if x.dtype == torch.bfloat16 else x.numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("golden", metavar="GOLDEN.h5", help="or a folder of goldens")
    parser.add_argument("output", metavar="OUT.h5", help="or the folder of their outputs")
    parser.add_argument("--operator", default="fla.ops.kda:chunk_kda", metavar="MODULE:FUNCTION")
    args = parser.parse_args()
    module, function = args.operator.split(":")
    operator = getattr(importlib.import_module(module), function)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    golden, output = Path(args.golden), Path(args.output)
    pairs = [(golden, output)]
    if golden.is_dir():
        output.mkdir(exist_ok=True)
        pairs = [(path, output / path.name) for path in sorted(golden.glob("*.h5"))]
        pairs = [(path, written) for path, written in pairs if read_golden(path).case.conv is None]
    for path, written in pairs:
        results = results_of(read_golden(path), operator, device)
        write_results(written, results, {"program": args.operator, "torch": torch.__version__}, force=True)
        print(f"{written}: {len(results)} tensors from {args.operator} on {device}")


if __name__ == "__main__":
    main()
