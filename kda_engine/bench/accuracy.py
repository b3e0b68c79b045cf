"""Relative error of the CUDA engine against float64, by regime.

`python -m kda_engine.bench.accuracy [--backward] [TOKENS ...]` prints the table for 16 heads of size 128 and bfloat16
inputs: of the forward against the token recurrence, of the gradients against the NumPy engine in float64.
"""

import argparse

import cupy
import numpy as np

from .. import cases, layout
from ..compare import compare
from ..engines import make_engine
from ..engines.host import HostEngine
from ..engines.reference import ReferenceEngine
from .problem import pick_heads

# Rows of one block in the worst-block figure.
BLOCK = 64

# Beyond so many tokens the gradients' oracle takes the first and the last head only.
ALL_HEADS = 4096


def measure_accuracy(regime, tokens, heads, dtype="bfloat16"):
    """{"out", "final_state", "worst 64 rows of a head"} of one regime of `cases` at head size 128.

    The last: the largest error of 64 rows of one head. The oracle runs in float64 on the device.
    """
    case = cases.make(regime, dtype=dtype, tokens=tokens, heads=heads, K=128, V=128)
    operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.cu_seqlens,
                              case.options.gate)
    engine = make_engine("cuda")
    operands, state = engine.take(operands), engine.take_array(case.initial_state.astype("f4"))
    result = engine.forward(operands, case.options, state, save=False)
    expected = ReferenceEngine().forward(operands, case.options, state, save=False)
    whole = -(-tokens // BLOCK)
    blocks = lambda x: np.array_split(cupy.asnumpy(x.astype("f4")), whole)
    worst = max(np.linalg.norm(a[:, h] - b[:, h]) / max(np.linalg.norm(b[:, h]), 1e-30)
                for a, b in zip(blocks(result.out), blocks(expected.out)) for h in range(operands.value_heads))
    return {"out": compare(result.out, expected.out), "final_state": compare(result.final_state, expected.final_state),
            "worst 64 rows of a head": float(worst)}


def measure_gradients(regime, tokens, heads, dtype="bfloat16"):
    """Relative error by gradient of one regime of `cases` at head size 128."""
    case = cases.make(regime, dtype=dtype, tokens=tokens, heads=heads, K=128, V=128)
    chosen = list(range(heads)) if tokens <= ALL_HEADS else [0, heads - 1]
    found = _gradients(make_engine("cuda"), case, range(heads), lambda x: x)
    expected = _gradients(HostEngine(), case, chosen, lambda x: x.astype("f8"))
    return {name: compare(pick_heads(name, found[name], chosen), x) for name, x in expected.items()}


def _gradients(engine, case, chosen, convert):
    """Of the chosen heads, from inputs converted first."""
    given = {name: convert(getattr(case, name)) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    operands, _ = layout.pack(**given, cu_seqlens=case.cu_seqlens, gate=case.options.gate)
    operands = operands.take_heads(list(chosen))
    state, d_out, d_state = (convert(x[:, chosen]) for x in (case.initial_state, case.d_out, case.d_final_state))
    operands, state, d_out, d_state = (engine.take(operands), *map(engine.take_array, (state, d_out, d_state)))
    saved = engine.forward(operands, case.options, state, save=True).saved
    return vars(engine.backward(saved, d_out, d_state))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backward", action="store_true", help="the gradients")
    parser.add_argument("tokens", type=int, nargs="*")
    arguments = parser.parse_args()
    measure = measure_gradients if arguments.backward else measure_accuracy
    rows = [(regime, tokens, measure(regime, tokens, heads=16))
            for tokens in arguments.tokens or [512 if arguments.backward else 8192]
            for regime in ("strong", "weak", "repeat")]
    names = list(rows[0][2])
    print(f"| regime | tokens | {' | '.join(names)} |\n| --- | --- |{' --- |' * len(names)}")
    for regime, tokens, row in rows:
        print(f"| {regime} | {tokens} | {' | '.join(f'{row[name]:.2e}' for name in names)} |")


if __name__ == "__main__":
    main()
