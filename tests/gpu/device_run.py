"""A case on the device: every stage twice, in memory with different poison, results as bits and as numbers."""

from dataclasses import replace

import cupy
import numpy as np
from guarded import POISONS, guarded

import kda_engine as kda
from kda_engine import layout
from kda_engine.arrays import to_host
from kda_engine.compare import DEVICE_TOLERANCES, REPEATED_KEY_DEVICE_TOLERANCES
from kda_engine.engines.cuda import CudaEngine
from kda_engine.engines.reference import ReferenceEngine


def stages(engine, case, summaries=True):
    """out, final_state of the forward; M, S and S alone of the summaries if wanted; on the host."""
    operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.cu_seqlens,
                              case.options.gate, case.initial_state)
    state = layout.state_in("initial_state", case.initial_state, operands, case.options.state_layout)
    operands, state = engine.take(operands), engine.take_array(state)
    forward = engine.forward(operands, case.options, state, save=False)
    results = {"out": forward.out, "final_state": forward.final_state}
    if summaries:
        pair = engine.summarise(operands, case.options, state, transition=True)
        alone = engine.summarise(operands, case.options, state, transition=False)
        assert alone.M is None
        results.update(M=pair.M, S=pair.S, S_alone=alone.S)
    return {name: to_host(x) for name, x in results.items()}


def convolved(case):
    """The case behind its short convolution."""
    if case.conv is None:
        return case
    through = {name: kda.short_conv(getattr(case, name), case.conv.weights[name], case.conv.biases.get(name),
                                    case.conv.activation, case.cu_seqlens) for name in ("q", "k", "v")}
    return replace(case, conv=None, **through)


def check(case, summaries=True):
    """Run a case twice and against the oracle; returns the relative error of each result."""
    case = convolved(case)
    given = {name: getattr(case, name).copy() for name in ("q", "k", "v", "g", "beta")}
    runs = []
    for poison in POISONS:
        with guarded(poison):
            runs.append(stages(CudaEngine(), case, summaries))
    for name, first in runs[0].items():
        assert first.tobytes() == runs[1][name].tobytes(), f"{name}: two runs differ"
    expected = stages(ReferenceEngine(), case, summaries)
    tolerances = REPEATED_KEY_DEVICE_TOLERANCES if case.repeated_keys else DEVICE_TOLERANCES
    tolerance = tolerances[str(case.q.dtype)]
    errors = {}
    for name, first in runs[0].items():
        errors[name] = error(first, expected[name], 1.0 if name == "M" else 0.0)
        assert errors[name] <= tolerance, f"{name}: error {errors[name]:.2e} above {tolerance:.0e}"
    for name, before in given.items():
        assert np.array_equal(before, getattr(case, name), equal_nan=True), f"{name}: changed"
    return errors


def error(a, b, least_norm):
    """kda.compare, but a matrix smaller than least_norm is measured against that.

    A transition that has decayed to almost nothing is only as exact as the identity it began as.
    """
    relative = kda.compare(a, b)
    norm = float(np.linalg.norm(b.astype("f8")))
    return relative * min(1.0, norm / least_norm) if least_norm else relative
