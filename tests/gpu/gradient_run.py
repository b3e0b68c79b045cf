"""A case's gradients on the device: twice, in memory with different poison, against the oracle."""

from dataclasses import replace

import numpy as np
from device_run import convolved
from guarded import POISONS, guarded

from kda_engine import layout
from kda_engine.arrays import to_host
from kda_engine.compare import DEVICE_TOLERANCES, REPEATED_KEY_DEVICE_TOLERANCES
from kda_engine.engines.cuda import CudaEngine
from kda_engine.engines.reference import ReferenceEngine
from kda_engine.gate import Gate

# How much more the tokens' gradients may show than outputs, being chains of more products; and the parameters', into
# whose terms the error of a gate's slope goes alike.
TOKENS = 4 / 3
PARAMETERS = 2

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
    # Gradients come in the types of their inputs: the oracle's are not to be rounded.
    wide = replace(case, **{name: getattr(case, name).astype("f8") for name in ("q", "k", "v", "g", "beta", "d_out")})
    expected = gradients(ReferenceEngine(), wide)
    added = terms(wide, expected["dg"])
    for name, b in expected.items():
        tolerance = tolerances[str(case.q.dtype)] * (PARAMETERS if name in added else TOKENS)
        errors[name] = error(runs[0][name], b, tolerance, added.get(name))
        assert errors[name] <= tolerance, f"{name}: error {errors[name]:.2e} above {tolerance:.0e}"
    return errors


def terms(case, dg):
    """What each token and channel adds to the parameters' gradients, by their names, from dg [T,HV,K]."""
    gate = Gate.of(layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.cu_seqlens,
                               case.options.gate)[0], case.options, np.dtype("f8"))
    # Each a head of its own, over which nothing is summed.
    alone = lambda x: np.broadcast_to(x, dg.shape).reshape(-1, 1)
    each = replace(gate, rate=alone(gate.rate), bias=alone(gate.bias))
    g = alone(case.g.reshape(dg.shape))[None]
    slope = each.adjoint(np.ones_like(g), g)[0]
    d_log_decay = np.divide(alone(dg)[None], slope, out=np.zeros_like(g), where=slope != 0)
    return {"dA_log": each.adjoint(d_log_decay, g)[1], "ddt_bias": dg}


def error(a, b, tolerance, added=None):
    """Relative Frobenius error; of float16 results, against values no smaller than that type can tell apart.

    added: of what b holds the sums. Where they cancel, the error of b is that of its terms: rounded independently, the
    root of the sum of their squares is what it is measured against.
    """
    if b.size == 0:
        return 0.0
    least = np.sqrt(b.size) * SMALLEST_FLOAT16 / tolerance if a.dtype == np.float16 else 1e-30
    if added is not None:
        least = max(least, np.linalg.norm(added))
    return float(np.linalg.norm(a.astype("f8") - b) / max(np.linalg.norm(b), least))
