"""A case through an engine's stages, and its results held against the oracle: for the device and its emulation."""

from dataclasses import replace

import numpy as np

import kda_engine as kda
from kda_engine import layout
from kda_engine.arrays import to_host
from kda_engine.compare import DEVICE_TOLERANCES, REPEATED_KEY_DEVICE_TOLERANCES
from kda_engine.engines.reference import ReferenceEngine
from kda_engine.gate import Gate

# How much more the tokens' gradients may show than outputs, being chains of more products; and the parameters', into
# whose terms the error of a gate's slope goes alike.
TOKENS = 4 / 3
PARAMETERS = 2

# The smallest float16: no gradient handed out in that type is closer to the truth than half of it.
SMALLEST_FLOAT16 = 2.0**-24


def convolved(case):
    """The case behind its short convolution."""
    if case.conv is None:
        return case
    through = {name: kda.short_conv(getattr(case, name), case.conv.weights[name], case.conv.biases.get(name),
                                    case.conv.activation, case.cu_seqlens) for name in ("q", "k", "v")}
    return replace(case, conv=None, **through)


def packed(case):
    """The `Operands` of a case."""
    return layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.cu_seqlens,
                       case.options.gate, case.initial_state)[0]


def states(case, operands):
    """(initial state, gradient of the final state), zeros where the case has none."""
    return tuple(layout.state_in(name, getattr(case, name), operands, case.options.state_layout)
                 for name in ("initial_state", "d_final_state"))


def stages(engine, case, summaries=True):
    """out, final_state of the forward; M, S and S alone of the summaries if wanted; on the host."""
    operands = packed(case)
    state = states(case, operands)[0]
    operands, state = engine.take(operands), engine.take_array(state)
    forward = engine.forward(operands, case.options, state, save=False)
    results = {"out": forward.out, "final_state": forward.final_state}
    if summaries:
        pair = engine.summarise(operands, case.options, state, transition=True)
        alone = engine.summarise(operands, case.options, state, transition=False)
        assert alone.M is None
        results.update(M=pair.M, S=pair.S, S_alone=alone.S)
    return {name: to_host(x) for name, x in results.items()}


def gradients(engine, case):
    """All gradients by name, and D: the gradient of the initial states from d_out and d_final_state alone."""
    operands = packed(case)
    state, d_state = states(case, operands)
    operands, state, d_state, d_out = (engine.take(operands), engine.take_array(state), engine.take_array(d_state),
                                       engine.take_array(case.d_out))
    saved = engine.forward(operands, case.options, state, save=True).saved
    results = dict(vars(engine.backward(saved, d_out, d_state)))
    results["D"] = engine.summarise_backward(operands, case.options, d_out, d_state)
    return {name: to_host(x) for name, x in results.items()}


def hold_stages(case, found):
    """The relative error of each result of `stages`; asserts that it is one that 16-bit products may show."""
    expected = stages(ReferenceEngine(), case, "M" in found)
    tolerance = _tolerance(case)
    errors = {}
    for name, first in found.items():
        errors[name] = _stage_error(first, expected[name], 1.0 if name == "M" else 0.0)
        assert errors[name] <= tolerance, f"{name}: error {errors[name]:.2e} above {tolerance:.0e}"
    return errors


def hold_gradients(case, found):
    """The relative error of each of the `gradients`; asserts that it is one that 16-bit products may show."""
    errors = {}
    # Gradients come in the types of their inputs: the oracle's are not to be rounded.
    wide = replace(case, **{name: getattr(case, name).astype("f8") for name in ("q", "k", "v", "g", "beta", "d_out")})
    expected = gradients(ReferenceEngine(), wide)
    added = _terms(wide, expected["dg"])
    for name, b in expected.items():
        tolerance = _tolerance(case) * (PARAMETERS if name in added else TOKENS)
        errors[name] = _gradient_error(found[name], b, tolerance, added.get(name))
        assert errors[name] <= tolerance, f"{name}: error {errors[name]:.2e} above {tolerance:.0e}"
    return errors


def _tolerance(case):
    return (REPEATED_KEY_DEVICE_TOLERANCES if case.repeated_keys else DEVICE_TOLERANCES)[str(case.q.dtype)]


def _stage_error(a, b, least_norm):
    """kda.compare, but a matrix smaller than least_norm is measured against that.

    A transition that has decayed to almost nothing is only as exact as the identity it began as.
    """
    relative = kda.compare(a, b)
    norm = float(np.linalg.norm(b.astype("f8")))
    return relative * min(1.0, norm / least_norm) if least_norm else relative


def _terms(case, dg):
    """What each token and channel adds to the parameters' gradients, by their names, from dg [T,HV,K]."""
    gate = Gate.of(packed(replace(case, initial_state=None)), case.options, np.dtype("f8"))
    # Each a head of its own, over which nothing is summed.
    alone = lambda x: np.broadcast_to(x, dg.shape).reshape(-1, 1)
    each = replace(gate, log_rate=alone(gate.log_rate), bias=alone(gate.bias))
    g = alone(case.g.reshape(dg.shape))[None]
    slope = each.adjoint(np.ones_like(g), g)[0]
    d_log_decay = np.divide(alone(dg)[None], slope, out=np.zeros_like(g), where=slope != 0)
    return {"dA_log": each.adjoint(d_log_decay, g)[1], "ddt_bias": dg}


def _gradient_error(a, b, tolerance, added=None):
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
