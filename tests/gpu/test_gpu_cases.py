"""Every case against the oracle, on every path the engine may take."""

import pytest
from device_run import check

from kda_engine import cases
from kda_engine.engines.cuda import fused

DTYPES = ("bfloat16", "float16", "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", cases.names())
def test_case(name, dtype):
    check(cases.make(name, dtype=dtype))


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("name", cases.names())
def test_case_in_parts(name, dtype, parts_of_one_chunk):
    check(cases.make(name, dtype=dtype))


@pytest.fixture
def portable(monkeypatch):
    """Only the kernels that run on every device."""
    monkeypatch.setattr(fused, "covers", lambda *given: False)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("name", ("strong", "weak", "repeat", "relay"))
def test_portable_kernels_where_a_fused_one_would_run(name, dtype, portable):
    check(cases.make(name, dtype=dtype, heads=2, K=128, V=128, tokens=300))


# Key and value sizes: native, padded, odd, unequal.
SIZES = ((64, 64), (128, 128), (256, 256), (128, 64), (64, 256), (256, 64), (200, 40), (256, 3), (65, 129), (1, 256))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K, V", SIZES)
def test_sizes(K, V, dtype):
    check(cases.make("packed", dtype=dtype, heads=2, value_heads=4, K=K, V=V))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K, V", SIZES)
def test_sizes_decoding(K, V, dtype):
    check(cases.make("softplus-logit2", dtype=dtype, heads=2, value_heads=4, K=K, V=V, lengths=(1, 0, 3, 8, 1)))


@pytest.mark.parametrize("heads, dtype", ((8, "bfloat16"), (8, "float32"), (96, "bfloat16")))
def test_relay_is_handed_on(heads, dtype):
    check(cases.make("relay", dtype=dtype, heads=heads, K=128, V=128, tokens=512), summaries=heads == 8)


@pytest.mark.parametrize("name", ("strong", "weak", "repeat"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_regimes(name, dtype):
    check(cases.make(name, dtype=dtype, heads=4, K=128, V=128, tokens=1000))
