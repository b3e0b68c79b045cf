"""A case's gradients on the device: twice, in memory with different poison, against the oracle."""

import numpy as np
from device_run import convolved
from guarded import POISONS, guarded

from kda_engine import layout
from kda_engine.arrays import to_host
from kda_engine.compare import DEVICE_TOLERANCES, REPEATED_KEY_DEVICE_TOLERANCES
from kda_engine.engines.cuda import CudaEngine
from kda_engine.engines.reference import ReferenceEngine

# How much more the tokens' gradients may show than outputs, being chains of more products; and the parameters', which are
# sums over tokens and channels whose terms cancel.
TOKENS = 4 / 3
PARAMETERS = 4

# The smallest float16: no gradient handed out in that type is closer to the truth than half of it.
SMALLEST_FLOAT16 = 2.0**-24


def gradients(engine, case):
    """All gradients by name, and D: the gradient of the initial states from d_out and d_final_state alone."""
    operands, packing = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias,
                                    case.cu_seqlens, case.options.gate, case.initial_state)
    state, d_state = (layout.state_in(name, getattr(case, name), operands, case.options.state_layout)
                      for name in ("initial_state", "d_final_state"))
    operands, state, d_state, d_out = (engine.take(operands), engine.take_array(state), engine.take_array(d_state),
                                       engine.take_array(case.d_out))
    saved = engine.forward(operands, case.options, state, save=True).saved
    results = dict(vars(engine.backward(saved, d_out, d_state)))
    results["D"] = engine.summarise_backward(operands, case.options, d_out, d_state)
    return {name: to_host(x) for name, x in results.items()}


def check_gradients(case):
    """Run a case twice and against the oracle; returns the relative error of each gradient."""
    case = convolved(case)
    runs = []
    for poison in POISONS:
        with guarded(poison):
            runs.append(gradients(CudaEngine(), case))
    for name, first in runs[0].items():
        assert first.tobytes() == runs[1][name].tobytes(), f"{name}: two runs differ"
    tolerances = REPEATED_KEY_DEVICE_TOLERANCES if case.repeated_keys else DEVICE_TOLERANCES
    errors = {}
    for name, expected in gradients(ReferenceEngine(), case).items():
        tolerance = tolerances[str(case.q.dtype)] * (PARAMETERS if name in ("dA_log", "ddt_bias") else TOKENS)
        errors[name] = error(runs[0][name], expected, tolerance)
        assert errors[name] <= tolerance, f"{name}: error {errors[name]:.2e} above {tolerance:.0e}"
    return errors


def error(a, b, tolerance):
    """Relative Frobenius error; of float16 results, against values no smaller than that type can tell apart."""
    if b.size == 0:
        return 0.0
    least = np.sqrt(b.size) * SMALLEST_FLOAT16 / tolerance if b.dtype == np.float16 else 1e-30
    a, b = a.astype("f8"), b.astype("f8")
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), least))
