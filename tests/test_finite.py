"""Values that cannot be right are named on request: argument, sequence, head and token of the first one."""

import numpy as np
import pytest
from oracle import arguments

import kda_engine as kda
from kda_engine import cases, layout
from kda_engine.finite import check_values


def forward(case, **changed):
    given, options = arguments(case)
    named = dict(zip(("q", "k", "v", "g", "beta"), given)) | options | changed
    return kda.forward(**named, engine="numpy", check_finite=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_tokens(name, bad):
    case = cases.make("empty-runs")
    getattr(case, name)[20, 1] = bad
    getattr(case, name)[30, 0] = bad
    # Sequences of 0, 0, 16, 0, 0, 0, 31 ... tokens: packed token 20 is the fifth of sequence 6.
    message = rf"^{name}: expected finite values, got {bad} at sequence 6, head 1, token 4 \(packed token 20\)$"
    with pytest.raises(kda.InputError, match=message):
        forward(case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types(dtype):
    case = cases.make("ordinary", dtype=dtype)
    case.v[3, 0, 5] = np.inf
    with pytest.raises(kda.InputError, match="^v: expected finite values, got inf at sequence 0, head 0, token 3 "):
        forward(case)


def test_log_decay():
    case = cases.make("resets")
    assert np.isneginf(case.g).any()
    forward(case)
    for bad in (1e-3, np.inf, np.nan):
        case = cases.make("resets")
        case.g[61, 0, 3] = bad
        message = "^g: expected log decay at most 0, got .* at sequence 1, head 0, token 1 "
        with pytest.raises(kda.InputError, match=message):
            forward(case)


def test_parameters_and_states():
    for name in ("A_log", "dt_bias"):
        case = cases.make("ordinary")
        getattr(case, name)[1] = np.nan
        with pytest.raises(kda.InputError, match=f"^{name}: expected finite values, got nan at head 1$"):
            forward(case)
    case = cases.make("packed")
    case.initial_state[2, 1, 3, 4] = np.inf
    with pytest.raises(kda.InputError, match="^initial_state: expected finite values, got inf at sequence 2, head 1$"):
        forward(case)


def test_not_looked_for_unless_asked():
    case = cases.make("ordinary")
    case.v[0] = np.nan
    given, options = arguments(case)
    assert np.isnan(kda.forward(*given, **options, engine="numpy").out).any()


def test_a_share_is_placed_in_the_whole():
    case = cases.make("ordinary")
    case.k[5, 0, 0] = np.nan
    operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, None, None, None, "lower_bound")
    with pytest.raises(kda.InputError, match=r"^rank 3: k: .* at sequence 7, head 0, token 5 \(packed token 105\)$"):
        check_values(operands, case.options, "rank 3: ", first_token=100, first_sequence=7)


@pytest.mark.parametrize("name", [name for name in cases.names() if not name.startswith("conv")])
def test_every_case_passes(name):
    forward(cases.make(name))


def results(case, save=True):
    given, options = arguments(case)
    return kda.forward(*given, **options, engine="numpy", save=save)


def test_finite_results():
    case = cases.make("packed")
    fwd = results(case)
    assert fwd.first_non_finite() is None and fwd.first_non_finite(kda.backward(fwd, case.d_out)) is None


@pytest.mark.parametrize("save", [True, False])
def test_the_first_output_that_is_not_finite(save):
    case = cases.make("packed")
    # Sequences of 33, 16, 48 and 5 tokens.
    case.v[40, 1, 3] = np.nan
    found = results(case, save).first_non_finite()
    assert found == kda.NonFinite("out", 9, sequence=1, head=1, token=7)


def test_the_first_output_of_a_batch():
    x = np.ones((3, 4, 2, 5), "f4")
    v = x.copy()
    v[1, 2, 1] = np.inf
    found = kda.forward(x, x, v, -x, x[..., 0], engine="numpy").first_non_finite()
    assert (found.tensor, found.sequence, found.head, found.token) == ("out", 1, 1, 2)


def test_gradients_that_are_not_finite():
    case = cases.make("packed")
    fwd = results(case)
    d_out = case.d_out.copy()
    d_out[40, 0] = np.nan
    found = fwd.first_non_finite(kda.backward(fwd, d_out))
    assert (found.tensor, found.sequence, found.head, found.token) == ("dq", 1, 0, 7)
    grads = kda.backward(fwd, case.d_out)
    grads.d_initial_state[2, 1, 0, 0] = np.inf
    assert fwd.first_non_finite(grads) == kda.NonFinite("d_initial_state", 1, sequence=2, head=1, token=None)
    grads = kda.backward(fwd, case.d_out)
    grads.ddt_bias[1, 4] = np.nan
    assert fwd.first_non_finite(grads) == kda.NonFinite("ddt_bias", 1, sequence=None, head=1, token=None)


def test_a_state_alone_that_is_not_finite():
    case = cases.make("packed")
    fwd = results(case)
    fwd.final_state[3, 0, 2, 2] = np.nan
    assert fwd.first_non_finite() == kda.NonFinite("final_state", 1, sequence=3, head=0, token=None)
