"""Decoding: token by token, or a few at a time, equals the forward of the whole."""

import numpy as np
import pytest
from oracle import arguments

import kda_engine as kda
from kda_engine import cases

NAMES = ["ordinary", "grouped-heads", "softplus-logit2", "log-value", "no-l2norm", "scale", "VK", "resets", "wide-keys",
         "thousands", "equal-keys-reflecting"]


@pytest.mark.parametrize("engine", ["numpy", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_the_forward(name, engine):
    case = cases.make(name, dtype="f8", lengths=(12, 12, 12))
    given, options = arguments(case)
    whole = kda.forward(*given, **options, engine=engine)
    per_sequence = [x.reshape((3, 12) + x.shape[1:]) for x in given]
    parameters = {key: options[key] for key in ("A_log", "dt_bias", "options")}
    state, outs, at = case.initial_state, [], 0
    for tokens in (1, 1, 3, 1, 6):
        out, state = kda.step(*(x[:, at : at + tokens] for x in per_sequence), state, **parameters, engine=engine)
        outs.append(out)
        at += tokens
    assert out.shape == (3, 6) + case.v.shape[1:] and state.shape == case.initial_state.shape
    assert kda.compare(np.concatenate(outs, axis=1).reshape(case.v.shape), whole.out) <= 1e-12
    assert kda.compare(state, whole.final_state) <= 1e-12


def test_a_single_packed_sequence():
    case = cases.make("ordinary", tokens=2)
    (q, k, v, g, beta), options = arguments(case)
    out, state = kda.step(q, k, v, g, beta, case.initial_state, A_log=case.A_log, dt_bias=case.dt_bias, engine="numpy")
    whole = kda.forward(q, k, v, g, beta, **options, engine="numpy")
    assert np.array_equal(out, whole.out) and np.array_equal(state, whole.final_state)


def test_half_types_keep_a_float32_state():
    """Rounding the carried state to bfloat16 would lose it within a few hundred tokens."""
    case = cases.make("weak", dtype="bfloat16", tokens=300, heads=1, K=16, V=16)
    given, options = arguments(case)
    exact = kda.forward(*(x.astype("f8") for x in given), **options, engine="reference").final_state
    state = case.initial_state
    for t in range(300):
        _, state = kda.step(*(x[t : t + 1] for x in given), state, A_log=case.A_log, dt_bias=case.dt_bias,
                            engine="numpy")
        assert state.dtype == np.float32
    assert kda.compare(state, exact) <= 2e-6


def test_no_state_means_zeros():
    case = cases.make("ordinary", tokens=1)
    given, _ = arguments(case)
    zeros = kda.step(*given, 0 * case.initial_state, engine="numpy")
    for absent, zero in zip(kda.step(*given, None, engine="numpy"), zeros):
        assert np.array_equal(absent, zero)


def test_errors_name_the_state_as_it_is_named_here():
    case = cases.make("ordinary", tokens=2)
    for state in (case.initial_state[:, :, :-1], "no array", case.initial_state.astype("i4")):
        with pytest.raises(kda.InputError, match="^state: expected "):
            kda.step(case.q, case.k, case.v, case.g, case.beta, state, engine="numpy")
