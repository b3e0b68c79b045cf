"""Sizes at which 32-bit offsets wrap, grids overflow or errors could add up: blocks of rows against the oracle."""

from dataclasses import replace

import cupy
import numpy as np
import pytest

import kda_engine as kda
from kda_engine import layout
from kda_engine.arrays import BFLOAT16
from kda_engine.bench.shapes import Shape, draw
from kda_engine.compare import DEVICE_TOLERANCES
from kda_engine.engines.cuda import CudaEngine
from kda_engine.engines.reference import ReferenceEngine

OPTIONS = kda.Options()
ROWS = 64

# With the strong gates of `draw`, a state this many tokens back no longer shows.
WARM_UP = 1536


@pytest.fixture(autouse=True)
def give_memory_back():
    yield
    cupy.get_default_memory_pool().free_all_blocks()


def pack(x, cu_seqlens):
    operands, _ = layout.pack(x["q"], x["k"], x["v"], x["g"], x["beta"], x["A_log"], x["dt_bias"], cu_seqlens,
                              OPTIONS.gate)
    return operands


def check_rows(operands, initial_state, out, starts):
    """out of ROWS rows from each start, two heads, against the oracle run from WARM_UP tokens before."""
    heads = np.array([0, operands.value_heads - 1])
    first = operands.slice_tokens(0, ROWS).take_heads(heads)
    expected = ReferenceEngine().forward(first, OPTIONS, initial_state[:1, heads], False).out
    assert kda.compare(out[:ROWS, heads], expected) <= DEVICE_TOLERANCES["bfloat16"]
    # All blocks side by side, as heads of one problem.
    cut = [operands.slice_tokens(start - WARM_UP, start + ROWS).take_heads(heads) for start in starts]
    wide = lambda name, axis: cupy.concatenate([getattr(part, name) for part in cut], axis=axis)
    blocks = replace(cut[0], **{name: wide(name, 1) for name in ("q", "k", "v", "g", "beta")},
                     **{name: wide(name, 0) for name in ("A_log", "dt_bias")})
    zeros = cupy.zeros((1, 2 * len(cut)) + initial_state.shape[2:], "f4")
    expected = ReferenceEngine().forward(blocks, OPTIONS, zeros, False).out[WARM_UP:]
    for number, start in enumerate(starts):
        error = kda.compare(out[start : start + ROWS, heads], expected[:, 2 * number : 2 * number + 2])
        assert error <= DEVICE_TOLERANCES["bfloat16"], f"rows from {start}: {error:.2e}"


def starts_in(tokens, extra=()):
    random = np.random.default_rng(3)
    return [*random.integers(WARM_UP, tokens - ROWS, 32).tolist(), tokens - ROWS, *extra]


@pytest.mark.parametrize("tokens, heads", ((524_800, 32), (1_048_576 + 5, 2)))
def test_long_sequence(tokens, heads):
    """The first case's tensors pass 2^31 elements; the second is one sequence of a million tokens."""
    x = draw(Shape((tokens,), heads), "strong")
    operands = pack(x, None)
    result = CudaEngine().forward(operands, OPTIONS, x["initial_state"], False)
    wrap = 2**31 // (heads * operands.K)
    extra = [wrap - ROWS, wrap - ROWS // 2, wrap] if wrap + ROWS < tokens else []
    check_rows(operands, x["initial_state"], result.out, starts_in(tokens, extra))


def test_seventy_thousand_sequences():
    lengths = np.random.default_rng(4).integers(0, 30, 70_000)
    x = draw(Shape(tuple(lengths.tolist()), 4), "strong")
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    operands = pack(x, cu_seqlens)
    result = CudaEngine().forward(operands, OPTIONS, x["initial_state"], False)
    chosen = [0, *np.random.default_rng(5).integers(1, 69_999, 64).tolist(), 69_999]
    for n in chosen:
        span = slice(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
        one = operands.slice_tokens(span.start, span.stop)
        expected = ReferenceEngine().forward(one, OPTIONS, x["initial_state"][n : n + 1], False)
        assert kda.compare(result.out[span], expected.out) <= DEVICE_TOLERANCES["bfloat16"], n
        assert kda.compare(result.final_state[n : n + 1], expected.final_state) <= DEVICE_TOLERANCES["bfloat16"], n


def test_more_sequence_heads_than_a_grid_has_rows():
    """More than 65,535 sequence heads, all of them decoding one token."""
    N, H = 20_000, 8
    x = draw(Shape((1,) * N, H), "weak")
    assert x["q"].dtype == BFLOAT16
    operands = pack(x, np.arange(N + 1))
    result = CudaEngine().forward(operands, OPTIONS, x["initial_state"], False)
    for n in (0, 8191, 8192, N - 1):
        expected = ReferenceEngine().forward(operands.slice_tokens(n, n + 1), OPTIONS, x["initial_state"][n : n + 1], False)
        assert kda.compare(result.out[n : n + 1], expected.out) <= DEVICE_TOLERANCES["bfloat16"], n
        assert kda.compare(result.final_state[n : n + 1], expected.final_state) <= DEVICE_TOLERANCES["bfloat16"], n


@pytest.mark.usefixtures("needs_hopper")
def test_a_million_tokens_of_32_heads_both_directions():
    """Twelve times 8 GiB of tensors: the records are made slab by slab, on the fused path; blocks of rows right."""
    if cupy.cuda.runtime.memGetInfo()[1] < 130 << 30:
        pytest.skip("a device of 130 GiB or more")
    tokens, heads = 1 << 20, 32
    x = draw(Shape((tokens,), heads), "strong")
    d_out = cupy.empty_like(x["v"])
    # A few rows at the end, and some in the middle: what they reach ends WARM_UP tokens before them.
    d_out[...] = 0
    random = cupy.random.default_rng(7)
    for start in (tokens // 2, tokens - ROWS):
        d_out[start : start + ROWS] = random.standard_normal((ROWS, heads, 128), dtype="f4").astype(d_out.dtype)
    cupy.get_default_memory_pool().free_all_blocks()
    fwd = kda.forward(**x, options=OPTIONS, engine="cuda")
    kept = fwd._saved.states
    assert fwd.path == kept.path.name == "fused" and len(kept.slabs) > 5
    gradients = kda.backward(fwd, d_out)
    print(f"peak {cupy.get_default_memory_pool().total_bytes() / 2**30:.1f} GiB")
    operands = pack(x, None)
    check_rows(operands, x["initial_state"], fwd.out, starts_in(tokens))
    chosen = np.array([0, heads - 1])
    for start in (tokens // 2, tokens - ROWS):
        first = start - 2 * WARM_UP
        part = operands.slice_tokens(first, start + ROWS).take_heads(chosen)
        zeros = cupy.zeros((1, 2, 128, 128), "f4")
        engine = ReferenceEngine()
        expected = engine.backward(engine.forward(part, OPTIONS, zeros, True).saved,
                                   d_out[first : start + ROWS, chosen], zeros)
        for name in ("dq", "dk", "dv", "dg", "dbeta"):
            found = getattr(gradients, name)[start - WARM_UP : start + ROWS, chosen]
            error = kda.compare(found, getattr(expected, name)[WARM_UP:])
            assert error <= 2 * DEVICE_TOLERANCES["bfloat16"], f"{name} from {start}: {error:.2e}"
