"""Cases: the same arguments give the same numbers, overrides fit together, the extreme ones are extreme."""

import numpy as np
import pytest

from kda_engine import InputError, cases


def arrays(case):
    return {name: x for name, x in vars(case).items() if isinstance(x, np.ndarray)}


@pytest.mark.parametrize("name", cases.names())
def test_seeded(name):
    first, again, other = cases.make(name), cases.make(name), cases.make(name, seed=1)
    assert arrays(first).keys() == arrays(again).keys()
    assert all(np.array_equal(x, arrays(again)[key]) for key, x in arrays(first).items())
    assert first.q.size == 0 or not np.array_equal(first.q, other.q)


@pytest.mark.parametrize("name", ["ordinary", "relay", "thousands", "log-value", "conv-biased"])
def test_types_hold_the_same_numbers(name):
    narrow, wide = cases.make(name, dtype="float32"), cases.make(name, dtype="float64")
    for key, x in arrays(narrow).items():
        assert x.dtype == (np.int64 if key == "cu_seqlens" else np.float32)
        assert np.array_equal(x.astype("f8"), arrays(wide)[key])
    half = cases.make(name, dtype="bfloat16")
    assert {str(x.dtype) for key, x in arrays(half).items() if key in ("q", "g", "d_out")} == {"bfloat16"}
    assert half.initial_state.dtype == np.float32 and np.array_equal(half.v, narrow.v.astype(half.v.dtype))


def test_shapes_follow_overrides():
    case = cases.make("grouped-heads", tokens=33, heads=3, K=5, V=7)
    assert case.q.shape == case.k.shape == (33, 3, 5) and case.v.shape == case.d_out.shape == (33, 6, 7)
    assert case.g.shape == (33, 6, 5) and case.beta.shape == (33, 6) and case.dt_bias.shape == (6, 5)
    assert case.initial_state.shape == (1, 6, 5, 7) and case.cu_seqlens is None
    assert cases.make("ordinary", value_heads=6).v.shape[1] == 6
    ragged = cases.make("ordinary", tokens=50, sequences=7)
    assert len(ragged.lengths) == 7 and ragged.lengths.sum() == 50 and (ragged.lengths >= 0).all()
    assert cases.make("packed", tokens=9).cu_seqlens[-1] == 9 and len(cases.make("packed", tokens=9).lengths) == 4
    assert cases.make("ordinary", lengths=(3, 0, 2)).cu_seqlens.tolist() == [0, 3, 3, 5]
    assert cases.make("ordinary", tokens=0, sequences=0).initial_state.shape[0] == 0
    assert cases.make("VK").initial_state.shape == (2, 2, 8, 16)
    conv = cases.make("conv-biased").conv
    assert conv.weights["q"].shape == (8, 4) and conv.weights["v"].shape == (24, 4) and conv.biases["k"].shape == (8,)


@pytest.mark.parametrize("overrides, message", [
    ({"name": "missing"}, "case: expected one of ordinary, .*, got 'missing'"),
    ({"dtype": "int32"}, "dtype: expected bfloat16, .*, got int32"),
    ({"dtype": "half-ish"}, "dtype: expected bfloat16"),
    ({"batch": 2}, "batch: expected an override named tokens, "),
    ({"K": 0}, "K: expected integers of at least 1, got 0"),
    ({"tokens": -1}, "tokens: expected integers of at least 0, got -1"),
    ({"tokens": 1.5}, "tokens: expected integers of at least 0, got 1.5"),
    ({"heads": 2, "value_heads": 3}, "value_heads: expected a multiple of 2 heads, got 3"),
    ({"sequences": 0}, "sequences: expected at least 1 for 70 tokens, got 0"),
    ({"lengths": (1, 2), "tokens": 4}, "lengths: expected no tokens or sequences beside it"),
    ({"lengths": (1, -2)}, "lengths: expected integers of at least 0, got -2"),
    ({"name": "relay", "K": 1}, "K: case relay expected at least 2, got 1"),
])
def test_bad_requests_are_named(overrides, message):
    with pytest.raises(InputError, match=f"^{message}"):
        cases.make(**({"name": "ordinary"} | overrides))


def test_extremes():
    assert abs(cases.make("saturated").g).min() >= 30 and cases.make("thousands").g.max() > 2000
    assert np.isneginf(cases.make("resets").g).any() and (cases.make("resets").g <= 0).all()
    repeat = cases.make("repeat")
    assert repeat.repeated_keys and (repeat.beta >= 4).all()
    # The first key is the common one and carries its own noise.
    assert 0.01 < np.linalg.norm(repeat.k[1:] - repeat.k[:1]) / np.linalg.norm(repeat.k[1:]) < 0.04
    assert np.array_equal(*np.broadcast_arrays(cases.make("equal-keys").k[:1], cases.make("equal-keys").k))
    expanding = cases.make("expanding")
    assert abs(1 - expanding.beta * (expanding.k**2).sum(-1)).max() > 1.2
    assert (cases.make("zero-keys").k[::3] == 0).all() and (cases.make("zero-queries").q[::3] == 0).all()
