"""Decay decisions and bounds by kernel against the definition: the same decisions, bounds that are never lower."""

from dataclasses import replace

import numpy as np
import pytest
from decay_run import entering, measured, pieces
from guarded import POISONS, guarded

import kda_engine as kda
from kda_engine import cases, decay
from kda_engine.arrays import BFLOAT16
from kda_engine.engines.cuda import CudaEngine
from kda_engine.layout import CHUNK

DTYPES = ("bfloat16", "float16", "float32")

# Of a bound's log by token, and relative; of a bound itself: what float32 inside the kernel may cost.
PER_TOKEN, RELATIVE, OF_NORMS = 1e-6, 1e-6, 1e-4


def same(found, expected, per_row, what, bound=True):
    """Numbers alike, infinities the same ones, and no bound below the definition's."""
    assert found.shape == expected.shape and found.dtype == np.float64, what
    finite = np.isfinite(expected)
    assert np.array_equal(found[~finite], expected[~finite]), what
    mine, exact = found[finite], expected[finite]
    assert np.all(abs(mine - exact) <= per_row + RELATIVE * abs(exact)), what
    if bound:
        assert np.all(found >= expected), f"{what}: below the definition"


def check(case, rules=True):
    for piece, d_out in pieces(case):
        runs = []
        for poison in POISONS:
            with guarded(poison):
                runs.append(measured(CudaEngine(), piece, case.options))
        for name, first in runs[0].items():
            assert first.tobytes() == runs[1][name].tobytes(), f"{name}: two runs differ"
        same(runs[0]["chunks"], decay.HOST.chunks(piece, case.options), CHUNK * PER_TOKEN, "chunks")
        for name, backward in (("last", False), ("first", True)):
            same(runs[0][name], decay.HOST.samples(piece, case.options, backward), CHUNK * PER_TOKEN, name, bound=False)
        check_bounds(piece, d_out, case.options)
        if rules:
            check_decisions(piece, case.options)


def check_bounds(piece, d_out, options):
    engine, sizes = CudaEngine(), entering(piece)
    on_device = engine.take(piece)
    same(decay.token_bounds_sum(on_device, options, engine.measure), decay.token_bounds_sum(piece, options),
         piece.tokens * PER_TOKEN, "sum")
    found = (decay.state_norm_bound(on_device, options, sizes, engine.measure),
             decay.gradient_norm_bound(on_device, options, engine.take_array(d_out), sizes, engine.measure))
    expected = (decay.state_norm_bound(piece, options, sizes),
                decay.gradient_norm_bound(piece, options, d_out, sizes))
    most = (1 + OF_NORMS) * np.exp(piece.tokens * PER_TOKEN)
    for mine, exact in zip(found, expected):
        assert np.all(mine >= exact) and np.all(mine <= most * exact)


def check_decisions(piece, options):
    engine = CudaEngine()
    on_device = engine.take(piece)
    for rule in ("certified", "sampled"):
        for tolerance in (1e-6, 0.3):
            chosen = kda.Options(**{**options.to_dict(), "decay_skip": rule, "tolerance": tolerance})
            for backward in (False, True):
                found = decay.decide(on_device, chosen, backward, engine.measure)
                expected = decay.decide(piece, chosen, backward)
                where = (rule, tolerance, backward)
                assert np.array_equal(found.num_warmup, expected.num_warmup), where
                assert np.array_equal(found.fallback, expected.fallback), where
                same(found.log_norm, expected.log_norm, piece.tokens * PER_TOKEN, where, bound=rule == "certified")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", cases.names())
def test_case(name, dtype):
    check(cases.make(name, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K, V", ((128, 128), (256, 256), (64, 200), (200, 40), (65, 129), (256, 3), (1, 1)))
@pytest.mark.parametrize("gate, beta, qk_l2norm", (("lower_bound", "logit", True), ("softplus", "logit2", False),
                                                   ("log", "value", True)))
def test_sizes(K, V, gate, beta, qk_l2norm, dtype):
    name = "log-value" if gate == "log" else "heads-differ"
    case = cases.make(name, dtype=dtype, heads=2, value_heads=6, K=K, V=V, tokens=101)
    options = replace(case.options, gate=gate, beta=beta, qk_l2norm=qk_l2norm)
    check(replace(case, options=options), rules=False)


@pytest.mark.parametrize("name", ("strong", "weak", "expanding"))
def test_a_long_piece(name):
    """More chunks than the first look, and many runs."""
    check(cases.make(name, dtype="bfloat16", heads=2, value_heads=2, K=128, V=128, tokens=5003))


def test_the_bound_of_float64_input_is_the_same_bound():
    """What is certified for 16-bit inputs holds for their exact values."""
    case = cases.make("expanding", dtype="bfloat16", K=128, V=128, tokens=500)
    exact = replace(case, **{name: getattr(case, name).astype("f8") for name in ("q", "k", "v", "g", "beta", "d_out")})
    (piece, _), (wide, _) = pieces(case)[0], pieces(exact)[0]
    engine = CudaEngine()
    found = engine.measure.chunks(engine.take(piece), case.options)
    assert np.all(found >= decay.HOST.chunks(wide, case.options))


def test_types_differ_and_rows_lie_where_they_like():
    case = cases.make("softplus-value", dtype="float32", K=13, V=7, tokens=90)
    piece, d_out = pieces(case)[0]
    mixed = replace(piece, g=piece.g.astype(BFLOAT16), k=piece.k.astype("f2")).slice_tokens(3, 90)
    check_bounds(mixed, d_out[3:].astype("f2"), case.options)
    check_decisions(mixed, case.options)


def test_nan_certifies_nothing():
    case = cases.make("strong", dtype="bfloat16", tokens=64)
    options = kda.Options(**{**case.options.to_dict(), "tolerance": 0.9})
    piece, _ = pieces(case)[0]
    engine = CudaEngine()
    assert not decay.decide(engine.take(piece), options, False, engine.measure).fallback.any()
    piece.g[-1, 0, 5] = np.nan
    found = decay.decide(engine.take(piece), options, False, engine.measure)
    assert found.fallback[0] and not found.fallback[1:].any()


def test_float64_is_refused():
    piece, _ = pieces(cases.make("ordinary", dtype="float64"))[0]
    engine = CudaEngine()
    with pytest.raises(kda.InputError, match="float64"):
        engine.measure.chunks(engine.take(piece), kda.Options())
