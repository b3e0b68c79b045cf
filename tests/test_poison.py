"""What one token that is not finite, or too large for float32, spoils: on the NumPy engine what it spoils in the oracle.

The oracle goes token by token, so nothing before the token is spoilt in the forward; in the backward a gradient is
spoilt only where the token enters it. Chunks must not carry it further.
"""

from dataclasses import replace

import numpy as np
import pytest
from oracle import arguments, run, upcast

import kda_engine as kda
from kda_engine import cases

TOKEN, HEAD = 45, 1
INPUTS = ("q", "k", "v", "g", "beta", "d_out")
TOKENS = ("out", "dq", "dk", "dv", "dg", "dbeta")
STATES = ("final_state", "d_initial_state")

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def poisoned(name, tensor, value):
    case = cases.make(name, tokens=80)
    x = getattr(case, tensor).copy()
    # The middle of the second chunk of 32; of a sequence that is not the first where there are several.
    x[TOKEN, HEAD] = value
    return replace(case, **{tensor: x})


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("tensor", INPUTS)
@pytest.mark.parametrize("name", ["ordinary", "softplus-logit2", "log-value", "no-l2norm"])
def test_a_token_that_is_not_finite_spoils_what_it_enters(name, tensor, value):
    if tensor == "g" and np.isinf(value):
        value = -np.inf if name != "log-value" else np.nan
    case = poisoned(name, tensor, value)
    if name.endswith("-logit2") or name.endswith("-value"):
        case = replace(case, cu_seqlens=np.array([0, 20, 80]))
    computed, expected = run(case, "numpy"), run(upcast(case), "reference")
    for result in TOKENS + STATES:
        spoilt, by_oracle = ~np.isfinite(computed[result]), ~np.isfinite(expected[result])
        assert (spoilt == by_oracle).all(), f"{result}: {spoilt.sum()} spoilt, {by_oracle.sum()} by the oracle"
        clean = lambda x: np.where(by_oracle, 0, x)
        assert kda.compare(clean(computed[result]), clean(expected[result])) <= 2e-5, result


@pytest.mark.parametrize("tensor", ["k", "v", "q"])
def test_a_token_too_large_for_float32_spoils_no_earlier_output(tensor):
    """Without the norm: products of its values leave float32, but each value is finite."""
    clean, large = cases.make("no-l2norm", tokens=80), poisoned("no-l2norm", tensor, 3e38)
    clean, large = (replace(x, options=replace(x.options, scale=1000.0)) for x in (clean, large))
    before, after = run(clean, "numpy"), run(large, "numpy")
    assert not np.isfinite(after["out"][TOKEN:, HEAD]).all()
    assert np.array_equal(after["out"][:TOKEN], before["out"][:TOKEN])
    assert np.array_equal(after["out"][:, 0], before["out"][:, 0])


def test_a_poisoned_gradient_reaches_no_later_token():
    case = poisoned("ordinary", "d_out", np.nan)
    result, clean = run(case, "numpy"), run(cases.make("ordinary", tokens=80), "numpy")
    for name in TOKENS[1:]:
        assert np.array_equal(result[name][TOKEN + 1 :], clean[name][TOKEN + 1 :]), name
        assert np.isnan(result[name][TOKEN, HEAD]).any(), name


@pytest.mark.parametrize("size", [1e20, 1e30, 3e38])
def test_a_huge_key_changes_no_bit_of_another_sequence(size):
    """The norm of rows whose squares leave float32 is taken in float64; other rows of the slab keep theirs."""
    case = cases.make("packed")
    changed = {name: getattr(case, name).copy() for name in ("k", "q")}
    for x in changed.values():
        x[40, 0] = size
    before, after = run(case, "numpy"), run(replace(case, **changed), "numpy")
    others = np.r_[0:33, 49:102]
    for name in TOKENS:
        assert np.array_equal(before[name][others], after[name][others]), name
    for name in STATES:
        assert np.array_equal(before[name][[0, 2, 3]], after[name][[0, 2, 3]]), name


def test_a_summary_keeps_the_clean_sequences():
    case = cases.make("packed")
    case.v[40:49] = np.nan
    (_, k, v, g, beta), options = arguments(case)
    pair = kda.summarize(k, v, g, beta, case.A_log, case.dt_bias, case.cu_seqlens, case.options, engine="numpy")
    # The transition does not depend on the values.
    assert np.isfinite(pair.M).all() and np.isfinite(pair.S[[0, 2, 3]]).all() and np.isnan(pair.S[1]).all()
