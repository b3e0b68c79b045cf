"""Options: defaults, what each field accepts, messages, the round trip through plain types."""

import math

import numpy as np
import pytest

import kda_engine as kda
from kda_engine import InputError, Options, cases


def test_defaults_are_the_documented_ones():
    assert Options().to_dict() == {
        "gate": "lower_bound", "lower_bound": -5.0, "beta": "logit", "qk_l2norm": True, "scale": None,
        "state_layout": "KV", "decay_skip": None, "tolerance": 0.0}


def test_plain_types_make_the_same_options_again():
    options = Options(gate="softplus", lower_bound=-2, beta="value", qk_l2norm=0, scale=1, state_layout="VK",
                      decay_skip="sampled", tolerance=1e-3)
    assert Options(**options.to_dict()) == options
    assert options.qk_l2norm is False and isinstance(options.scale, float) and isinstance(options.lower_bound, float)


def test_the_norm_switch_may_be_a_numpy_value():
    for value in (np.bool_(False), np.int8(0), 0, False):
        assert Options(qk_l2norm=value).qk_l2norm is False


@pytest.mark.parametrize("given, skip", [
    ({}, "exact"), ({"tolerance": 1e-6}, "certified"), ({"tolerance": 1e-6, "decay_skip": "exact"}, "exact"),
    ({"tolerance": 1e-6, "decay_skip": "sampled"}, "sampled"), ({"decay_skip": "exact"}, "exact")])
def test_the_skip_in_force(given, skip):
    assert Options(**given).skip == skip


def test_scale():
    assert Options().scale_for(64) == 0.125 and Options(scale=-2).scale_for(64) == -2.0
    assert Options(scale=0).scale_for(4) == 0


@pytest.mark.parametrize("name, value, expected", [
    ("gate", "sigmoid", "lower_bound, softplus, log"), ("gate", None, "lower_bound, softplus, log"),
    ("beta", "LOGIT", "logit, logit2, value"), ("state_layout", "kv", "KV, VK"),
    ("decay_skip", "fast", "exact, certified, sampled"), ("qk_l2norm", 2, "true or false"),
    ("qk_l2norm", "yes", "true or false"), ("qk_l2norm", 1.0, "true or false"),
    ("lower_bound", 0.0, r"\[-5, 0\)"), ("lower_bound", -5.5, r"\[-5, 0\)"), ("lower_bound", math.nan, "finite"),
    ("lower_bound", "-3", "finite"), ("scale", math.inf, "finite"), ("scale", "x", "a number"),
    ("scale", True, "finite"), ("tolerance", 1.0, r"\[0, 1\)"), ("tolerance", -1e-9, r"\[0, 1\)"),
    ("tolerance", None, "a number")])
def test_bad_values_name_field_expectation_and_value(name, value, expected):
    with pytest.raises(InputError, match=f"^{name}: expected .*{expected}.*, got {value!r}$"):
        Options(**{name: value})


@pytest.mark.parametrize("skip", ["certified", "sampled"])
def test_a_skip_without_tolerance(skip):
    with pytest.raises(InputError, match=f"^tolerance: decay_skip='{skip}' needs a tolerance above 0, got 0$"):
        Options(decay_skip=skip)


def test_options_are_immutable_and_errors_are_value_errors():
    with pytest.raises(AttributeError):
        Options().gate = "log"
    assert issubclass(InputError, ValueError)


def test_what_is_shown_is_short():
    """Options by what differs from the defaults, results by types and shapes."""
    assert repr(kda.Options()) == "Options()"
    assert repr(kda.Options(gate="log", tolerance=1e-6)) == "Options(gate='log', tolerance=1e-06)"
    assert eval(repr(kda.Options(scale=0.5)), {"Options": kda.Options}) == kda.Options(scale=0.5)
    case = cases.make("ordinary", tokens=9)
    fwd = kda.forward(case.q, case.k, case.v, case.g, case.beta, engine="numpy")
    assert repr(fwd) == ("ForwardResult(out=numpy float32 (9, 2, 16), final_state=numpy float32 (1, 2, 16, 16), "
                         "path='numpy')")
    assert repr(kda.backward(fwd, case.d_out)).startswith("Gradients(dq=numpy float32 (9, 2, 16), ")
    assert "dA_log=None" in repr(kda.backward(fwd, case.d_out))
