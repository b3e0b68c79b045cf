"""When a segment's transition may be dropped because the state has decayed, and the bound that proves it.

One token's map has spectral norm at most e^m, m = max_d l_d + log max(1, |1 - beta ||k||^2|) (l: log decay, k as
the recurrence uses it). Sums of m over a run of tokens bound the run's transition; per-channel sums of l do not.
Forward the run is the segment's end, backward its start: the warm-up. What the warm-up's transition multiplies is
lost, so the boundary's error is at most e^(sum of m) times the norm of the state (or gradient) before the warm-up.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from .arrays import array_module, to_host
from .gate import activate
from .layout import CHUNK

# Tokens activated at a time.
BLOCK = 64 * CHUNK

# Chunks looked at first for the warm-up; then, each time, as many as were seen before.
FIRST_LOOK = 64


@dataclass(frozen=True)
class Decision:
    """Per head of one piece, NumPy [HV].

    num_warmup: chunks (of CHUNK tokens, counted from the boundary inwards) that the rule asks for, all of them
    where fallback. fallback: the transition must be kept. log_norm: the rule's bound on the natural log of the norm
    of the warm-up's transition (for "sampled" an estimate, no bound; for "exact" 0).
    """

    num_warmup: np.ndarray
    fallback: np.ndarray
    log_norm: np.ndarray


class Measure:
    """What decisions and bounds need to know of a piece (an `Operands` of a single sequence), NumPy float64.

    Here array expressions, which define it. An engine may have the same by kernel (`Engine.measure`).
    """

    def chunks(self, piece, options):
        """The sums of m over each chunk [chunks,HV]."""
        starts = lambda block: np.arange(0, block.tokens, CHUNK)
        return _stack(piece, lambda block: np.add.reduceat(token_bounds(block, options), starts(block), axis=0))

    def samples(self, piece, options, backward):
        """The estimate from one token a chunk, its last (backward: first): length * max_d l. [chunks,HV].

        The public kernel that this repeats works in log2; here everything is natural, the decision is the same.
        """

        def of_block(block):
            starts = np.arange(0, block.tokens, CHUNK)
            stops = np.minimum(starts + CHUNK, block.tokens)
            sampled = starts if backward else stops - 1
            cut = {name: getattr(block, name)[sampled] for name in ("q", "k", "v", "g", "beta")}
            log_decay = activate(replace(block, **cut), options, "f8").log_decay
            return (stops - starts)[:, None] * to_host(log_decay.max(axis=-1))

        return _stack(piece, of_block)

    def runs(self, piece, options, backward):
        """(logs, added) [runs,HV] of consecutive runs of tokens; how many a run has is this measure's own affair.

        logs: the sums of m. added: a bound on what a run's tokens make of the state behind it that comes from no state
        before. backward: of the state's gradient in front of it, v being the output's gradient, but for the scale.
        """
        size = lambda rows: to_host(array_module(rows).sqrt((rows * rows).sum(axis=-1)))

        def of_block(block):
            x = activate(block, options, "f8")
            m = _token_bounds(x)
            if backward:
                new, reach = size(x.q) * size(x.v), np.cumsum(m, axis=0)
            else:
                new = to_host(abs(x.beta)) * size(x.k) * size(x.v)
                reach = np.cumsum(np.concatenate([np.zeros((1, m.shape[1])), m[:0:-1]]), axis=0)[::-1]
            return np.stack([m.sum(axis=0), passed_on(reach, new).sum(axis=0)])[None]

        both = _stack(piece, of_block, (2,))
        return both[:, 0], both[:, 1]


HOST = Measure()


def decide(piece, options, backward, measure=HOST):
    """The Decision by the rule in force (`options.skip`) for one piece: an `Operands` of a single sequence.

    backward: the warm-up lies at the piece's start and serves the state's gradient; else at its end.
    """
    HV = piece.value_heads
    chunks = -(-piece.tokens // CHUNK)
    if options.skip == "exact" or chunks == 0:
        return Decision(np.full(HV, chunks), np.ones(HV, bool), np.zeros(HV))
    threshold = math.log(options.tolerance)
    total = np.zeros(HV)
    num_warmup, log_norm = np.full(HV, chunks), np.zeros(HV)
    found = np.zeros(HV, bool)
    seen = 0
    while seen < chunks and not found.all():
        count = min(max(FIRST_LOOK, seen), chunks - seen)
        first = seen if backward else chunks - seen - count
        span = slice(first * CHUNK, min((first + count) * CHUNK, piece.tokens))
        part = piece.slice_tokens(span.start, span.stop)
        certified = options.skip == "certified"
        per_chunk = measure.chunks(part, options) if certified else measure.samples(part, options, backward)
        sums = total + np.cumsum(per_chunk if backward else per_chunk[::-1], axis=0)
        below = sums < threshold
        if options.skip == "sampled":
            # The slowest head decides for all.
            below = np.repeat((sums.max(axis=1) < threshold)[:, None], HV, axis=1)
        now = below.any(axis=0) & ~found
        at = np.argmax(below, axis=0)
        num_warmup[now] = seen + at[now] + 1
        log_norm[now] = sums[at[now], np.flatnonzero(now)]
        found |= now
        total = sums[-1]
        seen += count
    log_norm[~found] = total[~found]
    return Decision(num_warmup, ~found, log_norm)


def token_bounds(piece, options):
    """m [T,HV], float64: the log of the bound on each token's map."""
    return _token_bounds(activate(piece, options, "f8"))


def _token_bounds(x):
    module = array_module(x.k)
    growth = abs(1 - x.beta * (x.k * x.k).sum(axis=-1))
    return to_host(x.log_decay.max(axis=-1) + module.log(module.maximum(1, growth)))


def token_bounds_sum(piece, options, measure=HOST):
    """The sum of m over all tokens [HV]: the log of a bound on the whole run's transition."""
    return measure.chunks(piece, options).sum(axis=0)


def state_norm_bound(before, options, entering, measure=HOST):
    """A bound [HV] on the Frobenius norm of the state behind the tokens of `before` (one sequence).

    entering [HV]: norm of the state in front of them. Every token adds at most |beta| ||k|| ||v||, then shrinks (or
    grows) with the tokens behind it.
    """
    logs, added = measure.runs(before, options, backward=False)
    return _norm_bound(logs[::-1], added[::-1], entering)


def gradient_norm_bound(behind, options, d_out, leaving, measure=HOST):
    """A bound [HV] on the Frobenius norm of the state's gradient in front of the tokens of `behind` (one sequence).

    d_out [T,HV,V] of those tokens; leaving [HV]: norm of the gradient behind them. Every token adds at most
    scale ||q|| ||d_out||, then passes through its own map and those in front of it.
    """
    # The output gradient takes the place of v, which the gradient's norm does not depend on.
    logs, added = measure.runs(replace(behind, v=d_out), options, backward=True)
    return _norm_bound(logs, abs(options.scale_for(behind.K)) * added, leaving)


def _norm_bound(logs, added, boundary):
    """sum_r e^(sum of logs between run r and the boundary looked at) added_r + e^(sum of all logs) boundary.

    Runs in order of their distance from the boundary looked at.
    """
    reach = np.cumsum(np.concatenate([np.zeros((1, logs.shape[1])), logs]), axis=0)
    return passed_on(reach, np.concatenate([added, np.asarray(boundary, "f8")[None]])).sum(axis=0)


def passed_on(reach, size):
    """e^reach size; what is zero stays zero, however far it is passed on."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(size == 0, 0.0, np.exp(reach) * size)


def norm_bounds(logs, added, boundary):
    """The same at every run's end, the boundary [HV] in front of the first: [runs + 1,HV]."""
    norms = np.empty((len(logs) + 1, logs.shape[1]))
    norms[0] = boundary
    with np.errstate(over="ignore", invalid="ignore"):
        factors = np.exp(logs)
        for run, (factor, new) in enumerate(zip(factors, added)):
            norms[run + 1] = np.where(norms[run] == 0, 0.0, factor * norms[run]) + new
    return norms


@dataclass(frozen=True)
class Dropped:
    """What the certified rule dropped within a device.

    rows: one per cut and direction, as in a report: direction, sequence, token (the first behind the cut), and by head:
    num_warmup, fallback, log_norm, and bound, on the Frobenius norm of the error of the state (backward: of its
    gradient) at the cut. total: the sum of all bounds. No token's map lengthens a state where the rule drops within a
    device, so no state and no gradient of a state is further than `total` from what the exact rule gives.
    """

    rows: tuple
    total: float

    @classmethod
    def of(cls, rows):
        return cls(tuple(rows), float(sum(np.sum(row["bound"]) for row in rows)))


def _stack(piece, of_block, more=()):
    """of_block's rows [rows, *more, HV] for the whole piece, block by block."""
    starts = range(0, piece.tokens, BLOCK)
    blocks = (piece.slice_tokens(start, min(start + BLOCK, piece.tokens)) for start in starts)
    return np.concatenate([np.zeros((0, *more, piece.value_heads)), *map(of_block, blocks)])
