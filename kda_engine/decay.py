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

# Tokens activated at a time while looking for the warm-up.
BLOCK = 64 * CHUNK


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


def decide(piece, options, backward):
    """The Decision by the rule in force (`options.skip`) for one piece: an `Operands` of a single sequence.

    backward: the warm-up lies at the piece's start and serves the state's gradient; else at its end.
    """
    HV = piece.value_heads
    chunks = -(-piece.tokens // CHUNK)
    if options.skip == "exact" or chunks == 0:
        return Decision(np.full(HV, chunks), np.ones(HV, bool), np.zeros(HV))
    rule = _certified_chunks if options.skip == "certified" else _sampled_chunks
    threshold = math.log(options.tolerance)
    total = np.zeros(HV)
    num_warmup, log_norm = np.full(HV, chunks), np.zeros(HV)
    found = np.zeros(HV, bool)
    seen = 0
    while seen < chunks and not found.all():
        count = min(BLOCK // CHUNK, chunks - seen)
        first = seen if backward else chunks - seen - count
        span = slice(first * CHUNK, min((first + count) * CHUNK, piece.tokens))
        per_chunk = rule(piece.slice_tokens(span.start, span.stop), options, backward)
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
    x = activate(piece, options, "f8")
    module = array_module(x.k)
    growth = abs(1 - x.beta * (x.k * x.k).sum(axis=-1))
    return to_host(x.log_decay.max(axis=-1) + module.log(module.maximum(1, growth)))


def token_bounds_sum(piece, options):
    """The sum of m over all tokens [HV]: the log of a bound on the whole run's transition."""
    total = np.zeros(piece.value_heads)
    for start in range(0, piece.tokens, BLOCK):
        total += token_bounds(piece.slice_tokens(start, min(start + BLOCK, piece.tokens)), options).sum(axis=0)
    return total


def _certified_chunks(piece, options, backward):
    """Sums of m over each chunk [chunks, HV]."""
    return np.add.reduceat(token_bounds(piece, options), np.arange(0, piece.tokens, CHUNK), axis=0)


def _sampled_chunks(piece, options, backward):
    """The estimate from one token a chunk, its last (backward: first): length * max_d l. [chunks, HV].

    The public kernel that this repeats works in log2; here everything is natural, the decision is the same.
    """
    starts = np.arange(0, piece.tokens, CHUNK)
    stops = np.minimum(starts + CHUNK, piece.tokens)
    sampled = starts if backward else stops - 1
    cut = {name: getattr(piece, name)[sampled] for name in ("q", "k", "v", "g", "beta")}
    log_decay = activate(replace(piece, **cut), options, "f8").log_decay
    return (stops - starts)[:, None] * to_host(log_decay.max(axis=-1))


def state_norm_bound(before, options, entering):
    """A bound [HV] on the Frobenius norm of the state behind the tokens of `before` (one sequence).

    entering [HV]: norm of the state in front of them. Every token adds at most |beta| ||k|| ||v||, then shrinks (or
    grows) with the tokens behind it.
    """

    def added(x, module):
        size = lambda rows: module.sqrt((rows * rows).sum(axis=-1))
        return abs(x.beta) * size(x.k) * size(x.v)

    return _norm_bound(before, options, entering, added, backward=False)


def gradient_norm_bound(behind, options, d_out, leaving):
    """A bound [HV] on the Frobenius norm of the state's gradient in front of the tokens of `behind` (one sequence).

    d_out [T,HV,V] of those tokens; leaving [HV]: norm of the gradient behind them. Every token adds at most
    scale ||q|| ||d_out||, then passes through its own map and those in front of it.
    """
    scale = abs(options.scale_for(behind.K))

    def added(x, module):
        size = lambda rows: module.sqrt((rows * rows).sum(axis=-1))
        return scale * size(x.q) * size(x.v)

    # The output gradient takes the place of v, which the gradient's norm does not depend on.
    return _norm_bound(replace(behind, v=d_out), options, leaving, added, backward=True)


def _norm_bound(tokens, options, boundary, added, backward):
    """sum_t e^(sum of m between t and the boundary looked at) added_t + e^(sum of all m) boundary, block by block."""
    total = np.array(boundary, dtype="f8")
    starts = list(range(0, tokens.tokens, BLOCK))
    for start in reversed(starts) if backward else starts:
        block = tokens.slice_tokens(start, min(start + BLOCK, tokens.tokens))
        x = activate(block, options, "f8")
        m, new = token_bounds(block, options), to_host(added(x, array_module(x.k)))
        with np.errstate(over="ignore"):
            if backward:
                reach = np.exp(np.cumsum(m, axis=0))
                total = reach[-1] * total + (reach * new).sum(axis=0)
            else:
                behind = np.cumsum(m[::-1], axis=0)[::-1]
                reach = np.exp(np.concatenate([behind[1:], np.zeros((1, m.shape[1]))]))
                total = np.exp(behind[0]) * total + (reach * new).sum(axis=0)
    return total
