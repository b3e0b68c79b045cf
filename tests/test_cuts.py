"""What is said about transitions dropped at cuts within a device: no error is beyond its bound. Needs no GPU."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy")

from kda_engine import cases, decay, layout  # noqa: E402
from kda_engine.engines.cuda.activation import activation  # noqa: E402
from kda_engine.engines.cuda.cuts import Cuts  # noqa: E402
from kda_engine.engines.reference import ReferenceEngine  # noqa: E402
from kda_engine.layout import CHUNK  # noqa: E402

ENGINE = ReferenceEngine()


class OnTheHost(Cuts):
    """With NumPy arrays; decided: the decisions themselves."""

    @property
    def warmup(self):
        return None

    def _decisions(self):
        return self.decided

    def _norms(self, n):
        return np.linalg.norm(self.boundary[n].reshape(self.problem.value_heads, -1), axis=1)


class ByChunk:
    """The definition's measure, chunk by chunk."""

    def by_chunk(self, piece, options, backward):
        starts = range(0, piece.tokens, CHUNK)
        both = [decay.HOST.runs(piece.slice_tokens(t, min(t + CHUNK, piece.tokens)), options, backward) for t in starts]
        return tuple(np.concatenate(part) for part in zip(*both))


def drawn(name):
    case = cases.make(name, dtype="float64", heads=2, K=5, V=4, lengths=(0, 200, 90))
    options = replace(case.options, tolerance=0.5)
    operands, _ = layout.pack(case.q, case.k, case.v, case.g, case.beta, case.A_log, case.dt_bias, case.cu_seqlens,
                              options.gate, case.initial_state)
    return case, options, operands


@pytest.mark.parametrize("backward", (False, True))
@pytest.mark.parametrize("name", ("packed", "softplus-logit", "log-logit2", "grouped-heads"))
def test_the_state_at_a_cut_is_within_its_bound(name, backward):
    """Run from zero over the warm-up, against the truth. Heads with warm-ups of their own, and one that kept its past."""
    case, options, operands = drawn(name)
    HV = operands.value_heads
    bounds = operands.cu_seqlens
    plan = SimpleNamespace(slots=3, cut_tokens=np.array([bounds[1] + 64, bounds[1] + 128, bounds[2] + 32]),
                           cut_sequences=np.array([1, 1, 2]))
    warmup = np.random.default_rng(1).integers(0, 3, (3, HV))
    warmup[1, 0] = -1
    boundary = case.d_final_state if backward else case.initial_state
    problem = SimpleNamespace(**{n: getattr(operands, n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias",
                                                                   "cu_seqlens", "value_heads")},
                              options=options, activation=activation(options, operands.K))
    cuts = OnTheHost(problem, plan, boundary, case.d_out if backward else None, warmup)
    rows = cuts.rows(ByChunk(), first_token=1000, first_sequence=10)
    assert [(row["sequence"], row["token"]) for row in rows] == [
        (10 + n, 1000 + t) for n, t in zip(plan.cut_sequences, plan.cut_tokens)]
    seen = 0
    for slot, row in enumerate(rows):
        n, token = int(plan.cut_sequences[slot]), int(plan.cut_tokens[slot])
        start, stop = bounds[n], bounds[n + 1]
        assert row["direction"] == ("backward" if backward else "forward") and row["where"] == "device"
        for head in range(HV):
            assert row["fallback"][head] == (warmup[slot, head] < 0)
            if warmup[slot, head] < 0:
                assert row["bound"][head] == 0
                continue
            near = CHUNK * int(warmup[slot, head])
            if backward:
                state = lambda a, b, leaving: ENGINE.summarise_backward(
                    operands.slice_tokens(a, b), options, case.d_out[a:b], leaving)[0, head]
                true = state(token, stop, boundary[n : n + 1])
                found = state(token, min(token + near, stop), np.zeros_like(boundary[:1]))
            else:
                state = lambda a, b, entering: ENGINE.summarise(
                    operands.slice_tokens(a, b), options, entering, False).S[0, head]
                true = state(start, token, boundary[n : n + 1])
                found = state(token - near, token, np.zeros_like(boundary[:1]))
            error = np.linalg.norm(true - found)
            assert error <= row["bound"][head] * (1 + 1e-9), (slot, head)
            seen += error > 1e-3 * row["bound"][head]
    assert seen
    assert decay.Dropped.of(rows).total == pytest.approx(sum(sum(row["bound"]) for row in rows))


def test_nothing_dropped_is_not_told():
    case, options, operands = drawn("packed")
    plan = SimpleNamespace(slots=1, cut_tokens=np.array([64]), cut_sequences=np.array([1]))
    cuts = OnTheHost(SimpleNamespace(value_heads=2, cu_seqlens=operands.cu_seqlens), plan, None, None, np.full((1, 2), -1))
    assert cuts.rows(ByChunk()) == [] and decay.Dropped.of([]).total == 0


def test_bounds_between_runs_are_those_of_what_lies_before():
    case, options, operands = drawn("packed")
    piece = operands.slice_tokens(0, 160)
    logs, added = ByChunk().by_chunk(piece, options, False)
    entering = np.array([0.0, 3.0])
    norms = decay.norm_bounds(logs, added, entering)
    for chunk in range(len(logs) + 1):
        expected = decay.state_norm_bound(piece.slice_tokens(0, chunk * CHUNK), options, entering)
        assert np.allclose(norms[chunk], expected, rtol=1e-12)


def test_a_bound_that_is_not_known_stays_so():
    """NaN is kept; what is zero stays zero however it grows."""
    logs, added = np.array([[np.nan, np.inf], [0.0, 0.0]]), np.array([[0.0, 0.0], [1.0, 1.0]])
    assert np.isnan(decay.norm_bounds(logs, added, [1.0, 0.0])[-1, 0])
    assert decay.norm_bounds(logs, added, [1.0, 0.0])[-1, 1] == 1.0
