"""The gradients of every case against the oracle, on every path that the backward may take."""

import cupy
import numpy as np
import pytest
from gradient_run import check_gradients

import kda_engine as kda
from kda_engine import cases
from kda_engine.compare import DEVICE_TOLERANCES
from kda_engine.engines.cuda import portable_backward

DTYPES = ("bfloat16", "float16", "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", cases.names())
def test_gradients(name, dtype):
    check_gradients(cases.make(name, dtype=dtype))


# Cases whose sequences are worth cutting, and scratch memory for a slab of one chunk or of a few.
CUT = ("packed", "ragged", "empty-runs", "grouped-heads", "resets", "strong", "repeat", "VK")


@pytest.mark.parametrize("scratch", (1, 300_000))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("name", CUT)
def test_gradients_in_slabs(name, dtype, scratch, monkeypatch):
    monkeypatch.setattr(portable_backward, "SCRATCH_BYTES", scratch)
    check_gradients(cases.make(name, dtype=dtype))


@pytest.mark.parametrize("scratch", (portable_backward.SCRATCH_BYTES, 300_000))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("name", CUT)
def test_gradients_in_parts(name, dtype, scratch, parts_of_one_chunk, monkeypatch):
    monkeypatch.setattr(portable_backward, "SCRATCH_BYTES", scratch)
    check_gradients(cases.make(name, dtype=dtype))


SIZES = ((64, 64), (128, 128), (256, 256), (128, 64), (64, 256), (256, 64), (200, 40), (256, 3), (65, 129), (1, 256))


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("K, V", SIZES)
def test_gradients_of_sizes(K, V, dtype):
    check_gradients(cases.make("packed", dtype=dtype, heads=2, value_heads=4, K=K, V=V, lengths=(33, 0, 16, 5)))


@pytest.mark.parametrize("name", ("strong", "weak", "repeat"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_regimes(name, dtype):
    check_gradients(cases.make(name, dtype=dtype, heads=2, K=128, V=128, tokens=512))


def test_strengths_of_zero_get_a_gradient():
    case = cases.make("lower_bound-value", K=32, V=16)
    case.beta[::3] = 0
    errors = check_gradients(case)
    assert errors["dbeta"] <= DEVICE_TOLERANCES["float32"]


def test_an_output_gradient_of_another_type_loses_nothing():
    case = cases.make("packed", dtype="bfloat16", K=64, V=64)
    given = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")}
    d_out = np.random.default_rng(0).standard_normal(case.v.shape, dtype="f4")
    found, expected = (
        kda.backward(kda.forward(**given, cu_seqlens=case.cu_seqlens, options=case.options, engine=engine), d_out)
        for engine in ("cuda", "reference"))
    assert found.dv.dtype == case.v.dtype
    assert kda.compare(found.d_initial_state, expected.d_initial_state) <= DEVICE_TOLERANCES["float32"]


def test_the_slabs_of_a_long_problem_bound_its_memory():
    case = cases.make("strong", dtype="bfloat16", heads=16, K=128, V=128, tokens=16384)
    given = {name: cupy.asarray(getattr(case, name)) for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    fwd, d_out = kda.forward(**given, engine="cuda"), cupy.asarray(case.d_out)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    kda.backward(fwd, d_out)
    results = 5 * case.v.nbytes
    assert pool.total_bytes() - before <= 2 * portable_backward.SCRATCH_BYTES + 2 * results
