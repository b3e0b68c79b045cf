"""Decay skip: the certified bound is a bound, its counterexamples fall back, the sampled rule is the published one."""

import json
import math

import numpy as np
import pytest

import kda_engine as kda
from kda_engine import cases, decay, layout
from kda_engine.affine import Affine
from kda_engine.engines.host import HostEngine
from kda_engine.layout import CHUNK
from mpi_runner.parallel.boundary import BACKWARD, FORWARD
from mpi_runner.parallel.warmup import warmup
from mpi_runner.report import accumulate_bounds, dropped_total, finite_rows


def piece_of(case):
    operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, None,
                              case.options.gate)
    return operands


def certified(case, tolerance):
    return kda.Options(**{**case.options.to_dict(), "decay_skip": "certified", "tolerance": tolerance})


def transition(operands, options):
    """M [HV,K,K] in float64."""
    zeros = np.zeros(operands.state_shape)
    return HostEngine(threads=1).summarise(operands, options, zeros, transition=True).M[0]


SINGLE = [name for name in cases.names() if cases.make(name).cu_seqlens is None and cases.make(name).conv is None
          and len(cases.make(name).q)]


@pytest.mark.parametrize("name", SINGLE)
def test_token_bounds_bound_the_transition(name):
    case = cases.make(name, dtype="f8")
    operands = piece_of(case)
    norms = np.linalg.norm(transition(operands, case.options), ord=2, axis=(1, 2))
    bounds = np.exp(decay.token_bounds_sum(operands, case.options))
    assert np.all(norms <= bounds * (1 + 1e-9) + 1e-300)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", SINGLE)
def test_a_dropped_warmup_is_below_the_tolerance(name, backward):
    case = cases.make(name, dtype="f8")
    operands, options = piece_of(case), certified(case, 1e-3)
    decision = decay.decide(operands, options, backward)
    chunks = -(-operands.tokens // CHUNK)
    for head in range(operands.value_heads):
        count = int(decision.num_warmup[head])
        assert 1 <= count <= chunks
        warmup = slice(0, count * CHUNK) if backward else slice((chunks - count) * CHUNK, operands.tokens)
        part = operands.slice_tokens(warmup.start, min(warmup.stop, operands.tokens))
        M = transition(part.take_heads([head]), options)
        norm = np.linalg.norm(M[0], 2)
        assert norm <= math.exp(decision.log_norm[head]) * (1 + 1e-9) + 1e-300
        if not decision.fallback[head]:
            assert norm < 1e-3


def test_a_skip_happens_where_decay_is_strong():
    case = cases.make("strong", dtype="f8", tokens=1500)
    decision = decay.decide(piece_of(case), certified(case, 1e-6), backward=False)
    assert not decision.fallback.all()
    assert np.all(decision.num_warmup[~decision.fallback] < 1500 // CHUNK)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["relay", "alternating", "alternating-reflecting", "weak", "repeat"])
def test_what_only_seems_to_decay_falls_back(name, backward):
    case = cases.make(name, dtype="f8")
    assert decay.decide(piece_of(case), certified(case, 1e-6), backward).fallback.all()


@pytest.mark.parametrize("beta, norm", [(1.0, 0.09), (2.0, 1.0)])
def test_per_channel_sums_are_no_bound(beta, norm):
    """Two channels that decay in turn, one key between them: after four tokens the transition has this norm."""
    g = np.array([[0.0, -5.0], [-5.0, 0.0]] * 2)[:, None]
    k = np.full((4, 1, 2), 0.5**0.5)
    options = kda.Options(gate="log", beta="value", qk_l2norm=False)
    pair = kda.summarize(k, np.zeros((4, 1, 1)), g, np.full((4, 1), beta), options=options, engine="reference")
    measured = np.linalg.norm(pair.M[0, 0], 2)
    assert abs(measured - norm) <= 0.01
    per_channel = math.exp(g[:, 0].sum(axis=0).max())
    assert per_channel < 5e-5 < measured
    operands, _ = layout.pack(None, k, np.zeros((4, 1, 1)), g, np.full((4, 1), beta), None, None, None, "log")
    assert measured <= math.exp(decay.token_bounds_sum(operands, options)[0]) * (1 + 1e-12)


@pytest.mark.parametrize("beta, k", [(1.0, 2.0), (0.5, 3.0), (2.5, 1.0), (-0.5, 1.0)])
def test_the_bound_counts_what_makes_a_token_expand(beta, k):
    """With one channel the map is the number e^l (1 - beta k^2), and the bound its size."""
    options = kda.Options(gate="log", beta="value", qk_l2norm=False)
    given = (np.full((1, 1, 1), k), np.zeros((1, 1, 1)), np.full((1, 1, 1), -0.3), np.full((1, 1), beta))
    operands, _ = layout.pack(None, *given, None, None, None, "log")
    M = kda.summarize(*given, options=options, engine="reference").M
    assert np.isclose(decay.token_bounds(operands, options)[0, 0], np.log(abs(M[0, 0, 0, 0])), rtol=1e-12)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-6])
def test_the_warm_up_is_the_shortest_below_the_tolerance(tolerance, backward):
    case = cases.make("heads-differ", dtype="f8", tokens=603)
    options = kda.Options(**{**case.options.to_dict(), "tolerance": tolerance})
    decision = decay.decide(piece_of(case), options, backward)
    assert not decision.fallback.all() and len(set(decision.num_warmup)) > 1
    starts = np.arange(0, 603, CHUNK)
    chunks = np.add.reduceat(decay.token_bounds(piece_of(case), options), starts, axis=0)
    sums = np.cumsum(chunks if backward else chunks[::-1], axis=0)
    for head in np.flatnonzero(~decision.fallback):
        warmup = decision.num_warmup[head]
        assert sums[warmup - 1, head] < math.log(tolerance)
        assert warmup == 1 or sums[warmup - 2, head] >= math.log(tolerance)
        assert np.isclose(decision.log_norm[head], sums[warmup - 1, head], rtol=1e-12)
    assert np.all(sums[-1, decision.fallback] >= math.log(tolerance))


def test_the_warm_up_of_several_heads_is_the_longest():
    piece = piece_of(cases.make("ordinary", tokens=70))
    decision = decay.Decision(np.array([1, 3, 5]), np.array([False, False, True]), np.zeros(3))
    assert warmup(piece, decision, np.array([0, 1]), FORWARD) == slice(2 * CHUNK, 70)
    assert warmup(piece, decision, np.array([0, 1]), BACKWARD) == slice(0, 3 * CHUNK)
    # The last chunk is a short one.
    assert all(warmup(piece, decision, np.array([2]), way) == slice(0, 70) for way in (FORWARD, BACKWARD))


@pytest.mark.parametrize("name", ["strong", "ordinary", "grouped-heads", "expanding", "thousands"])
def test_norm_bounds_bound_the_state_and_its_gradient(name):
    case = cases.make(name, dtype="f8")
    operands = piece_of(case)
    engine = HostEngine(threads=1)
    random = np.random.default_rng(0)
    entering = random.standard_normal(operands.state_shape)
    size = lambda x: np.linalg.norm(x.reshape(x.shape[1], -1), axis=1)
    state = engine.summarise(operands, case.options, entering, transition=False).S
    assert np.all(size(state) <= decay.state_norm_bound(operands, case.options, size(entering)) * (1 + 1e-12))
    gradient = engine.summarise_backward(operands, case.options, case.d_out, entering)
    bound = decay.gradient_norm_bound(operands, case.options, case.d_out, size(entering))
    assert np.all(size(gradient) <= bound * (1 + 1e-12))


class Watched(decay.Measure):
    """Counts the tokens that decisions look at."""

    seen = 0

    def chunks(self, piece, options):
        self.seen += piece.tokens
        return super().chunks(piece, options)


@pytest.mark.parametrize("backward", [False, True])
def test_a_decision_looks_no_further_than_twice_the_warm_up(backward):
    case = cases.make("heads-differ", dtype="f8", tokens=9000, heads=2, value_heads=2, K=4, V=4)
    options = kda.Options(**{**case.options.to_dict(), "tolerance": 1e-300})
    watched = Watched()
    decision = decay.decide(piece_of(case), options, backward, watched)
    longest = int(decision.num_warmup.max())
    assert not decision.fallback.any() and longest < 9000 // CHUNK // 2
    assert longest * CHUNK <= watched.seen <= max(2 * longest, decay.FIRST_LOOK) * CHUNK


@pytest.mark.parametrize("name", ["strong", "ordinary", "expanding", "scale"])
def test_norm_bounds_do_not_depend_on_the_runs(name, monkeypatch):
    case = cases.make(name, dtype="f8", tokens=150)
    operands, size = piece_of(case), np.arange(cases.make(name).v.shape[1])

    def bounds():
        return (decay.state_norm_bound(operands, case.options, size),
                decay.gradient_norm_bound(operands, case.options, case.d_out, size))

    whole = bounds()
    monkeypatch.setattr(decay, "BLOCK", 3 * CHUNK)
    for a, b in zip(bounds(), whole):
        assert np.allclose(a, b, rtol=1e-12, atol=0) and np.all(a > 0)


def test_nothing_grows_from_nothing():
    """A run that expands beyond float64 makes no NaN of zeros."""
    one = np.ones((2000, 1, 1))
    operands, _ = layout.pack(one, one, 0 * one, 0 * one, 3 * one[:, 0], None, None, None, "log")
    options = kda.Options(gate="log", beta="value", qk_l2norm=False)
    assert decay.token_bounds_sum(operands, options)[0] > 1000
    assert decay.state_norm_bound(operands, options, np.zeros(1)) == 0
    assert decay.gradient_norm_bound(operands, options, 0 * one, np.zeros(1)) == 0


@pytest.mark.parametrize("backward", [False, True])
def test_sampled_is_the_published_rule_in_log2(backward):
    """Term by term as published: log2 units, the slowest channel of one token a chunk, the slowest head decides."""
    case = cases.make("strong", dtype="f8", tokens=70)
    operands = piece_of(case)
    lower_bound, tolerance = case.options.lower_bound, 1e-3
    sigma = 1 / (1 + np.exp(-np.exp(case.A_log)[:, None] * (case.g + case.dt_bias)))
    chunks = [(start, min(start + CHUNK, 70)) for start in range(0, 70, CHUNK)]
    total, warmup = np.zeros(operands.value_heads), None
    for count, (start, stop) in enumerate(chunks if backward else chunks[::-1], 1):
        token = start if backward else stop - 1
        total += lower_bound * math.log2(math.e) * sigma[token].min(axis=-1) * (stop - start)
        if warmup is None and total.max() < math.log2(tolerance):
            warmup = count
    options = kda.Options(**{**case.options.to_dict(), "decay_skip": "sampled", "tolerance": tolerance})
    decision = decay.decide(operands, options, backward)
    assert decision.fallback.tolist() == [warmup is None] * operands.value_heads
    if warmup is not None:
        assert decision.num_warmup.tolist() == [warmup] * operands.value_heads


def test_exact_never_drops():
    case = cases.make("thousands", dtype="f8")
    decision = decay.decide(piece_of(case), case.options, backward=False)
    assert decision.fallback.all()


def test_affine_without_transition_ignores_what_enters():
    assert Affine(None, np.ones((1, 1))).apply(np.full((1, 1), np.nan)) == 1


def test_reported_bounds_are_json():
    """Infinities stand as the largest number, what is only sampled has no bound."""
    row = {"direction": "forward", "rank": 0, "sequence": 0, "rule": "certified", "bound": [np.inf, 0.5],
           "log_norm": [-np.inf, -1.0], "log_transition": [-np.inf, 0.0]}
    after = row | {"rank": 1, "bound": [0.0, 0.25]}
    sampled = row | {"sequence": 1, "rule": "sampled"}
    rows = accumulate_bounds([row, after, sampled])
    json.dumps(rows, allow_nan=False)
    largest = np.finfo("f8").max
    assert row["total_bound"] == [largest, 0.5] and row["log_norm"] == [-largest, -1.0]
    assert after["total_bound"][1] == 0.75
    assert sampled["bound"] is None and sampled["total_bound"] is None


def test_one_total_of_all_drops():
    """Of ranks what is left of each boundary's error, of cuts within a device their own; nothing unknown becomes small."""
    of_rank = {"rule": "certified", "total_bound": [0.5, 0.25]}
    of_cut = {"rule": "certified", "bound": [1.0, 0.0], "log_norm": [-1.0, 0.0]}
    assert dropped_total([], []) == 0 and dropped_total([of_rank], [of_cut, of_cut]) == 2.75
    assert dropped_total([of_rank | {"rule": "sampled", "total_bound": None}], [of_cut]) is None
    unknown = finite_rows([of_cut | {"bound": [np.nan, 1.0], "log_norm": [-np.inf, 0.0]}])
    largest = np.finfo("f8").max
    assert unknown[0]["bound"] == [largest, 1.0] and unknown[0]["log_norm"] == [-largest, 0.0]
    assert dropped_total([], unknown) == largest and dropped_total([], [of_cut | {"bound": [np.nan]}]) == largest


def test_drops_within_an_engine_are_told_of_the_whole_problem():
    """A rank's groups count sequences and tokens by themselves."""
    from types import SimpleNamespace

    from kda_engine.partition import partition
    from mpi_runner.parallel.share import Share
    from mpi_runner.parallel.skips import rows_within

    case = cases.make("packed", lengths=(100, 0, 60, 40))
    operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.cu_seqlens,
                              case.options.gate)
    segments = partition(operands.cu_seqlens, 2)
    found = []
    for segment in segments:
        share = Share.of(segment, operands.slice_tokens(segment.start, segment.stop))
        forwards = {}
        for name, group in share.named_groups:
            rows = [{"sequence": n, "token": int(start)} for n, start in enumerate(group.operands.cu_seqlens[:-1])]
            forwards[name] = SimpleNamespace(dropped=(lambda rows=rows: rows,), saved=None)
        found += rows_within(share, segment, forwards)
    starts = [(piece.sequence, piece.start, segment.rank) for segment in segments for piece in segment.pieces]
    assert [(row["sequence"], row["token"], row["rank"]) for row in found] == starts and len(starts) >= 4
