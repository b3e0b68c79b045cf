"""The adjoint of the short convolution by kernel against the array expressions in float64."""

import cupy
import ml_dtypes
import numpy as np
import pytest
from guarded import POISONS, guarded

import kda_engine as kda
from kda_engine.engines.cuda import conv

# Two sequences without tokens; some shorter than the halo; chunks of nothing but halo, of both, of tokens alone.
LENGTHS = (7, 0, 1, 3, 40, 16, 2, 17, 0)
BOUNDS = np.concatenate([[0], np.cumsum(LENGTHS)])
NAMES = ("dx", "dweight", "dbias", "dhalo")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OF_INPUT = {np.dtype("f4"): 1e-6, np.dtype("f2"): 1e-3, BFLOAT16: 3e-3}
# What is left in float32 whatever the type of x; sums over few tokens, whose terms cancel.
IN_FLOAT32 = 2e-6


def problem(width, channels, dtype):
    """dy, x, weight, bias, halo on the host."""
    random = np.random.default_rng(7)
    normal = lambda *shape: random.standard_normal(shape).astype("f4")
    return (normal(BOUNDS[-1], channels).astype(dtype), normal(BOUNDS[-1], channels).astype(dtype),
            normal(channels, width), normal(channels), normal(len(LENGTHS), width - 1, channels))


def gradients(dy, x, weight, bias, activation, halo):
    """By name, on the host, of arguments on the host."""
    arrays = (dy, x, weight, bias, halo)
    dy, x, weight, bias, halo = (None if given is None else cupy.asarray(given) for given in arrays)
    found = kda.short_conv_backward(dy, x, weight, bias, activation, BOUNDS, halo)
    assert all(d is None or isinstance(d, cupy.ndarray) for d in found)
    return {name: d.get() for name, d in zip(NAMES, found) if d is not None}


def definition(dy, x, weight, bias, activation, halo):
    """The same in float64."""
    arrays = (dy, x, weight, bias, halo)
    dy, x, weight, bias, halo = (None if given is None else given.astype("f8") for given in arrays)
    found = kda.short_conv_backward(dy, x, weight, bias, activation, BOUNDS, halo)
    return {name: d for name, d in zip(NAMES, found) if d is not None}


def check(found, expected, dtype):
    assert found.keys() == expected.keys()
    for name, d in found.items():
        assert d.dtype == (dtype if name == "dx" else np.float32) and d.shape == expected[name].shape, name
        assert kda.compare(d, expected[name]) <= (OF_INPUT[dtype] if name == "dx" else IN_FLOAT32), name


@pytest.mark.parametrize("dtype", OF_INPUT, ids=str)
@pytest.mark.parametrize("width, channels", ((1, 3), (2, 128), (4, 200), (5, 130), (17, 3), (40, 5)))
def test_kernel_equals_the_definition(width, channels, dtype):
    dy, x, weight, bias, halo = problem(width, channels, dtype)
    for activation in ("silu", None):
        for given in ((bias, activation, halo), (None, activation, None)):
            runs = []
            for poison in POISONS:
                with guarded(poison):
                    runs.append(gradients(dy, x, weight, *given))
            for name, first in runs[0].items():
                assert first.tobytes() == runs[1][name].tobytes(), f"{name}: two runs differ"
            check(runs[0], definition(dy, x, weight, *given), dtype)


@pytest.mark.parametrize("of_input, of_output", ((BFLOAT16, np.dtype("f4")), (np.dtype("f4"), np.dtype("f2"))), ids=str)
def test_output_gradient_of_another_type(of_input, of_output):
    dy, x, *rest = problem(4, 130, np.dtype("f4"))
    given = dy.astype(of_output), x.astype(of_input), *rest[:2], "silu", rest[2]
    check(gradients(*given), definition(*given), of_input)


def test_heads_and_strides_are_channels():
    random = cupy.random.default_rng(0)
    x, dy = (random.standard_normal((20, 3, 16), dtype="f4")[:, :, ::2] for _ in range(2))
    weight = random.standard_normal((24, 4), dtype="f4")
    found = kda.short_conv_backward(dy, x, weight)
    expected = kda.short_conv_backward(dy.get().astype("f8"), x.get().astype("f8"), weight.get())
    assert found[0].shape == (20, 3, 8) and found[2] is None
    for name, d, exact in zip(NAMES, found, expected):
        assert exact is None or kda.compare(d.get(), exact) <= IN_FLOAT32, name


@pytest.mark.parametrize("width", (1, 4))
def test_no_tokens(width):
    x = cupy.empty((0, 130), "f4")
    with guarded(POISONS[0]):
        dx, dweight, dbias, dhalo = kda.short_conv_backward(x, x, cupy.ones((130, width), "f4"), cupy.ones(130, "f4"))
        assert dx.shape == (0, 130) and dweight.shape == (130, width) and dhalo.shape == (1, width - 1, 130)
        assert not (dweight.get().any() or dbias.get().any() or dhalo.get().any())


def test_infinite_weight_reaches_nothing_it_does_not_multiply():
    """Rows that are no tokens have no gradient to multiply, not one of 0."""
    dy, x, weight, bias, halo = problem(4, 3, np.dtype("f4"))
    weight[1, 0] = np.inf
    found = gradients(dy, x, weight, bias, None, halo)
    expected = definition(dy, x, weight, bias, None, halo)
    for name in NAMES:
        assert np.array_equal(np.isfinite(found[name]), np.isfinite(expected[name])), name


def test_kernel_or_array_expressions(monkeypatch):
    """float64 is for the array expressions, the other types for the kernel."""
    taken, kernel = [], conv.short_conv_backward
    monkeypatch.setattr(conv, "short_conv_backward", lambda given, dy: taken.append(1) or kernel(given, dy))
    for dtype, expected in (*((dtype, 1) for dtype in OF_INPUT), (np.dtype("f8"), 0)):
        taken.clear()
        gradients(*(problem(4, 3, dtype)[:4]), "silu", None)
        assert len(taken) == expected, dtype


def test_offsets_beyond_32_bits():
    """Tensors of more than 2^31 values: some channels of all tokens."""
    tokens, channels, chosen = 524_800, 4096, [0, 1, 4094, 4095]
    random = cupy.random.default_rng(0)
    normal = lambda *shape: random.standard_normal(shape, dtype="f4")
    x, dy = (normal(tokens, channels).astype(BFLOAT16) for _ in range(2))
    weight, bias, halo = normal(channels, 4), normal(channels), normal(2, 3, channels)
    bounds = [0, 300_001, tokens]
    found = kda.short_conv_backward(dy, x, weight, bias, cu_seqlens=bounds, halo=halo)
    part = lambda given: given.get().astype("f8")
    expected = kda.short_conv_backward(part(dy[:, chosen]), part(x[:, chosen]), part(weight[chosen]),
                                       part(bias[chosen]), cu_seqlens=bounds, halo=part(halo[:, :, chosen]))
    dx, dweight, dbias, dhalo = found
    check({"dx": dx[:, chosen].get(), "dweight": dweight[chosen].get(), "dbias": dbias[chosen].get(),
           "dhalo": dhalo[:, :, chosen].get()}, dict(zip(NAMES, expected)), BFLOAT16)
    # By rows too: where the offsets wrap, an error would drown among so many tokens.
    wrap = 2**31 // channels
    for rows in (slice(wrap - 32, wrap), slice(wrap, wrap + 32), slice(tokens - 32, tokens), slice(299_990, 300_010)):
        assert kda.compare(dx[rows][:, chosen].get(), expected[0][rows]) <= OF_INPUT[BFLOAT16], rows
    del found, dx, x, dy
    cupy.get_default_memory_pool().free_all_blocks()
