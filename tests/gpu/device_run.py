"""A case on the device: every stage twice, in memory with different poison, results as bits and as numbers."""

import numpy as np
from guarded import POISONS, guarded
from stages import convolved, hold_stages, stages

from kda_engine.engines.cuda import CudaEngine


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
    errors = hold_stages(case, runs[0])
    for name, before in given.items():
        assert np.array_equal(before, getattr(case, name), equal_nan=True), f"{name}: changed"
    return errors
