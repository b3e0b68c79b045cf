"""A case's gradients on the device: twice, in memory with different poison, against the oracle."""

from guarded import POISONS, guarded
from stages import convolved, gradients, hold_gradients

from kda_engine.engines.cuda import CudaEngine


def check_gradients(case):
    """Run a case twice and against the oracle; returns the relative error of each gradient."""
    case = convolved(case)
    runs = []
    for poison in POISONS:
        with guarded(poison):
            runs.append(gradients(CudaEngine(), case))
    for name, first in runs[0].items():
        assert first.tobytes() == runs[1][name].tobytes(), f"{name}: two runs differ"
    return hold_gradients(case, runs[0])
