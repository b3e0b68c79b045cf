"""The oracle against the definition written from scratch, its adjoint against complex steps, in every case."""

from dataclasses import replace

import definition
import numpy as np
import pytest
from oracle import assert_close, run, upcast

from kda_engine import cases, layout
from kda_engine.engines.reference import ReferenceEngine

WITHOUT_CONV = [name for name in cases.names() if not name.startswith("conv")]


def tiny(name):
    """The case with few enough numbers that every single one can be varied."""
    overrides = {"tokens": min(11, cases.make(name).q.shape[0]), "K": 3, "V": 2}
    case = cases.make(name, dtype="float64", seed=5, **overrides)
    if case.options.state_layout == "VK":
        swap = lambda x: np.ascontiguousarray(x.swapaxes(2, 3))
        case = replace(case, options=replace(case.options, state_layout="KV"),
                       initial_state=swap(case.initial_state), d_final_state=swap(case.d_final_state))
    return case


@pytest.mark.parametrize("name", WITHOUT_CONV)
def test_reference_equals_the_definition_and_its_complex_step_gradients(name):
    case = tiny(name)
    assert_close(run(case, "reference"), definition.tensors(case), 1e-12)


def test_gradients_by_real_differences():
    """Complex steps could share a blind spot with the definition; plain central differences do not."""
    case = cases.make("packed", dtype="float64", K=4, V=3, lengths=(5, 0, 6))
    result = run(case, "reference")
    random = np.random.default_rng(1)

    def loss(changed):
        forward = run(changed, "reference")
        return (forward["out"] * case.d_out).sum() + (forward["final_state"] * case.d_final_state).sum()

    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"):
        x = getattr(case, name)
        direction = random.standard_normal(x.shape)
        slope = lambda h: (loss(replace(case, **{name: x + h * direction}))
                           - loss(replace(case, **{name: x - h * direction}))) / (2 * h)
        # Richardson: the error of order h^2 cancels.
        differences = (4 * slope(1e-3) - slope(2e-3)) / 3
        exact = (result[{"initial_state": "d_initial_state"}.get(name, "d" + name)] * direction).sum()
        assert abs(differences - exact) <= 1e-8 * max(1, abs(exact)), name


def test_adjoint_beyond_one_checkpoint_equals_its_parts():
    """Two halves, the second's state gradient entering the first, equal the whole: checkpoints change nothing."""
    case = cases.make("ordinary", dtype="float64", tokens=50)
    whole = run(case, "reference")
    cut = 23
    parts = [replace(case, **{name: getattr(case, name)[span] for name in ("q", "k", "v", "g", "beta", "d_out")})
             for span in (slice(0, cut), slice(cut, None))]
    first = run(parts[0], "reference")
    second = run(replace(parts[1], initial_state=first["final_state"]), "reference")
    first = run(replace(parts[0], d_final_state=second["d_initial_state"]), "reference")
    joined = {name: np.concatenate([first[name], second[name]]) for name in ("out", "dq", "dk", "dv", "dg", "dbeta")}
    joined.update({name: first[name] + second[name] for name in ("dA_log", "ddt_bias")},
                  final_state=second["final_state"], d_initial_state=first["d_initial_state"])
    assert_close(joined, whole, 1e-13)


def test_saved_types_follow_the_inputs():
    case = cases.make("ordinary", dtype="bfloat16")
    result = run(case, "reference")
    assert {str(result[name].dtype) for name in ("out", "dq", "dk", "dv", "dg", "dbeta")} == {"bfloat16"}
    assert {str(result[name].dtype) for name in ("final_state", "d_initial_state", "dA_log", "ddt_bias")} == {"float32"}
    exact = run(upcast(case), "reference")
    assert exact["out"].dtype == np.float64
    # Only the outputs are rounded: half a unit in the last of 8 bits.
    assert_close({"out": result["out"]}, {"out": exact["out"]}, 2.0**-8)
    assert_close({"final_state": result["final_state"]}, {"final_state": exact["final_state"]}, 1e-7)


def test_a_long_sequence_can_be_stopped():
    """Every stage looks up from its work more than once a sequence."""
    case = cases.make("ordinary", tokens=1000)
    operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, None,
                              case.options.gate)
    calls = []
    engine = ReferenceEngine(lambda: calls.append(1))
    state = layout.state_in("initial_state", None, operands, "KV")
    counts = []
    for stage in (lambda: engine.summarise(operands, case.options, state, transition=True),
                  lambda: engine.forward(operands, case.options, state, save=True),
                  lambda: engine.summarise_backward(operands, case.options, case.d_out, state)):
        before = len(calls)
        stage()
        counts.append(len(calls) - before)
    assert min(counts) >= 4
