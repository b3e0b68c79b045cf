"""Relative error of the CUDA engine's forward against the float64 recurrence, by regime.

`python -m kda_engine.bench.accuracy [TOKENS ...]` prints the table for 16 heads of size 128 and bfloat16 inputs.
"""

import sys

import cupy
import numpy as np

from .. import cases, layout
from ..compare import compare
from ..engines import make_engine
from ..engines.reference import ReferenceEngine

# Rows of one block in the worst-block figure.
BLOCK = 64


def measure_accuracy(regime, tokens, heads, dtype="bfloat16"):
    """{"out", "final_state", "worst_block"} of one regime of `cases` at head size 128.

    worst_block: the largest error of 64 rows of one head. The oracle runs in float64 on the device.
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
            "worst_block": float(worst)}


def main(lengths):
    print("| regime | tokens | out | final state | worst 64 rows of a head |\n| --- | --- | --- | --- | --- |")
    for tokens in lengths:
        for regime in ("strong", "weak", "repeat"):
            row = measure_accuracy(regime, tokens, heads=16)
            print(f"| {regime} | {tokens} | {row['out']:.2e} | {row['final_state']:.2e} | {row['worst_block']:.2e} |")


if __name__ == "__main__":
    main([int(tokens) for tokens in sys.argv[1:]] or [8192])
