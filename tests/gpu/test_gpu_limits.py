"""The fused path's limits as docs/numerics.md states them, on the device: what one value that is not finite spoils, and how
much larger later values of a chunk may be. The emulation holds the same statements (test_emulation_limits.py).
"""

from dataclasses import replace

import numpy as np
import pytest
from stages import gradients, stages
from test_emulation_limits import LOST, OF_TOKENS, RIGHT, SPOILT, error, finite, make

from kda_engine import cases
from kda_engine.engines.cuda import CudaEngine
from kda_engine.engines.reference import ReferenceEngine

pytestmark = pytest.mark.usefixtures("needs_hopper")


def results(case, engine=None):
    engine = engine or CudaEngine()
    return stages(engine, case, summaries=False) | gradients(engine, case)


def pair(case):
    """(the device's results, those in float64)."""
    wide = replace(case, **{name: getattr(case, name).astype("f8") for name in ("q", "k", "v", "g", "beta", "d_out")})
    with np.errstate(all="ignore"):
        return results(case), results(wide, ReferenceEngine())


@pytest.mark.parametrize("name", SPOILT)
def test_what_a_token_that_is_not_finite_spoils(name):
    """Its chunk of 16 or tile of 32 and what depends on them, of its own head; never an output of an earlier chunk."""
    case = make("weak", heads=2)
    spoilt = getattr(case, name).copy()
    spoilt[20, 0] = np.nan
    found, whole = results(replace(case, **{name: spoilt})), results(case)
    for result, span in SPOILT[name].items():
        rows = np.flatnonzero(~finite(found[result])[:, 0].reshape(96, -1).all(axis=1))
        assert (None if not len(rows) else (rows[0], rows[-1])) == span, result
        assert found[result][:, 1].tobytes() == whole[result][:, 1].tobytes(), result
    assert found["out"][:16].tobytes() == whole["out"][:16].tobytes()


@pytest.mark.parametrize("at", (1, 9, 20, 50))
@pytest.mark.parametrize("name", ("q", "k", "v", "g", "beta"))
@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_no_output_of_an_earlier_chunk_is_spoilt(name, at, value):
    case = make("weak", heads=2)
    spoilt = getattr(case, name).copy()
    spoilt[at] = value
    before = slice(0, at // 16 * 16)
    found, whole = (stages(CudaEngine(), x, summaries=False)["out"] for x in (replace(case, **{name: spoilt}), case))
    assert found[before].tobytes() == whole[before].tobytes()


@pytest.mark.parametrize("exponent, right", ((10, True), (16, True), (21, True), (24, False)))
def test_large_values_later_in_a_chunk(exponent, right):
    """Values 2^exponent times larger from token 40 on; tokens 32 to 39 are before them in the chunk."""
    case = make("weak", heads=2)
    v = case.v.copy()
    v[40:48] *= v.dtype.type(2.0**exponent)
    both = pair(replace(case, v=v))
    worst = max(error(both, name, slice(32, 40)) for name in ("out", "dq", "dk", "dbeta"))
    assert worst <= LOST if right else worst > LOST
    for rows in (slice(0, 32), slice(40, None)):
        assert max(error(both, name, rows) for name in ("out", *OF_TOKENS)) <= LOST
    assert error(both, "final_state") <= RIGHT


@pytest.mark.parametrize("name", ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "d_out"))
@pytest.mark.parametrize("dtype, K", (("bfloat16", 64), ("float32", 64), ("bfloat16", 128)))
def test_nothing_is_finite_that_should_not_be(dtype, K, name):
    """Whatever a NaN reaches in the recurrence it reaches on the device, states, gradients and all; not another head."""
    case = cases.make("weak", dtype=dtype, tokens=96, heads=2, K=K, V=K)
    spoilt = getattr(case, name).copy()
    spoilt[(1,) if name in ("A_log", "dt_bias") else (20, 1)] = np.nan
    found, expected = pair(replace(case, **{name: spoilt}))
    for result, x in expected.items():
        assert not finite(found[result])[~finite(x)].any(), result
        if x.ndim > 1 and found[result].shape[1] == 2:
            assert finite(found[result])[:, 0].all(), result
