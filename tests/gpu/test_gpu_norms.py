"""Keys and queries of any size that their type holds: the norm makes them alike. Every path, forward and backward."""

from dataclasses import replace

import numpy as np
import pytest
from decay_run import pieces
from device_run import check
from gradient_run import check_gradients
from stages import gradients, stages

import kda_engine as kda
from kda_engine import cases
from kda_engine.engines.cuda import CudaEngine
from kda_engine.engines.reference import ReferenceEngine

# Squares overflow float32 from 1.8e19 on; sums of 64 or 128 of them before.
LARGE = (1e18, 1e30)
TINY = 1e-20
# (element type, K and V): the portable kernels, then the fused ones where there are any.
KINDS = (("float32", 64), ("bfloat16", 64), ("bfloat16", 128))


def scaled(names, size, dtype="bfloat16", K=128, regime="strong", **sizes):
    case = cases.make(regime, dtype=dtype, heads=2, K=K, V=K, **(sizes or {"tokens": 100}))
    return replace(case, **{name: (getattr(case, name).astype("f4") * np.float32(size)).astype(case.k.dtype)
                            for name in names})


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("names", ("q", "k", "qk"))
@pytest.mark.parametrize("dtype, K", KINDS)
def test_large_keys_and_queries(dtype, K, names, size):
    case = scaled(names, size, dtype, K)
    check(case)
    check_gradients(case)


@pytest.mark.parametrize("size", LARGE)
@pytest.mark.parametrize("dtype, K", KINDS)
def test_one_large_token_among_ordinary_ones(dtype, K, size):
    case = scaled("", 1.0, dtype, K)
    q, k = case.q.copy(), case.k.copy()
    q[37] *= q.dtype.type(size)
    k[21] *= k.dtype.type(size)
    check(replace(case, q=q, k=k))
    check_gradients(replace(case, q=q, k=k))


@pytest.mark.parametrize("size", (*LARGE, TINY))
@pytest.mark.parametrize("dtype, K", KINDS)
def test_decoding(dtype, K, size):
    check(scaled("qk", size, dtype, K, lengths=(1, 3, 8, 0, 2)), summaries=False)


@pytest.mark.parametrize("names", ("q", "k", "qk"))
@pytest.mark.parametrize("dtype, K", (("float32", 64), ("bfloat16", 64)))
def test_tiny_keys_and_queries(dtype, K, names):
    """Epsilon is what divides them then."""
    case = scaled(names, TINY, dtype, K)
    check(case)
    check_gradients(case)


@pytest.mark.usefixtures("needs_hopper")
def test_tiny_keys_and_queries_of_the_fused_path():
    """Behind the norm they are 1e-16, and zeros in float16: tiny keys write nothing, tiny queries read nothing."""
    case = scaled("qk", TINY)
    found = stages(CudaEngine(), case, summaries=False)
    assert np.abs(found["out"].astype("f4")).max() <= 1e-14 and np.isfinite(found["final_state"]).all()
    for name, x in gradients(CudaEngine(), case).items():
        assert np.isfinite(x.astype("f4")).all(), name


@pytest.mark.parametrize("size", (*LARGE, TINY))
def test_bounds_of_decays_stay_bounds(size):
    case, engine = scaled("qk", size), CudaEngine()
    for piece, d_out in pieces(case):
        ordinary, (piece, _) = engine.take(pieces(scaled("", 1.0))[0][0]), (engine.take(piece), d_out)
        for backward in (False, True):
            logs, added = engine.measure.runs(piece, case.options, backward)
            expected = engine.measure.runs(ordinary, case.options, backward)
            # A key of no length leaves the growth of a token's map at 1, which is rounded upwards.
            assert ((logs >= expected[0]) & (logs <= expected[0] + 1e-9)).all()
            assert np.isfinite(added).all() and (added <= (1 + 1e-5) * expected[1].max()).all()


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_a_single_channel(dtype):
    """The norm leaves of dq and dk what epsilon leaves: 1e-6 of what two sums that cancel would be made of."""
    case = cases.make("strong", dtype=dtype, tokens=50, heads=2, K=1, V=32)
    found, expected = gradients(CudaEngine(), case), gradients(ReferenceEngine(), case)
    for name in ("dq", "dk"):
        error = kda.compare(found[name], expected[name])
        assert error <= 5e-3, f"{name}: {error:.1e}"
