"""Which transitions of a rank's pieces may be dropped, and what each drop can cost: rows of the report."""

from dataclasses import dataclass

import numpy as np

from kda_engine import decay

from .boundary import BACKWARD, FORWARD, passes
from .warmup import heads_of, values_of, warmup


@dataclass(frozen=True)
class Skips:
    """The decisions of one run, the same for both directions.

    decisions: by direction, the `decay.Decision` on the piece that feeds others there; None where there is none.
    kept [R,HV] bool: of every rank, the heads of the piece that passes right through it whose transition is kept.
    """

    decisions: dict
    kept: np.ndarray

    def kept_heads(self, direction, segment):
        """The heads [HV] bool of the piece that feeds others in this direction whose past is kept."""
        return self.kept[segment.rank] if passes(segment) else self.decisions[direction].fallback


def decide(share, segments, options, engine, control, with_backward):
    """The Skips of this rank. Collective. The sampled and certified rules look at the operands' decays."""
    segment, HV = segments[control.rank], share.operands.value_heads
    decision = lambda group, direction: None if group is None else decay.decide(
        group.operands, options, direction is BACKWARD, engine.measure)
    ahead = decision(share.left if passes(segment) else share.right, FORWARD)
    back = decision(share.left, BACKWARD) if with_backward else None
    passing = np.array([passes(s) for s in segments])
    kept = np.repeat(passing[:, None], HV, axis=1)
    if options.skip != "exact" and passing.any():
        # One decision serves both directions: a head is dropped only where both allow it, so that the forward's
        # transitions are all that the backward needs.
        mine = [False] * HV
        if passing[control.rank]:
            mine = (ahead.fallback if back is None else ahead.fallback | back.fallback).tolist()
        kept = np.array(control.collect(mine, "agreeing on the decay decisions"), bool).reshape(-1, HV)
    return Skips({FORWARD: ahead, BACKWARD: back}, kept)


def report_row(side, skips):
    """Of one rank and direction: which heads' past was dropped, and the bound on what that cost. A dict."""
    direction, segment, operands = side.direction, side.segment, side.feeding.operands
    decision, kept = skips.decisions[direction], skips.kept_heads(direction, segment)
    piece = direction.feeds(segment)
    dropped = np.flatnonzero(~kept)
    HV = operands.value_heads
    row = {
        "direction": direction.name, "rank": segment.rank, "sequence": piece.sequence,
        "tokens": [piece.start, piece.stop], "rule": side.options.skip,
        "num_warmup": decision.num_warmup.tolist(), "fallback": kept.tolist(),
        "log_norm": decision.log_norm.tolist(), "bound": [0.0] * HV, "log_transition": [0.0] * HV,
    }
    if side.options.skip == "certified":
        # A rule that looked at every token for every head has this sum already.
        whole = (decision.log_norm if decision.fallback.all()
                 else decay.token_bounds_sum(operands, side.options, side.engine.measure))
        row["log_transition"] = whole.tolist()
        if len(dropped):
            row["bound"] = _bound(side, decision, dropped).tolist()
    return row


def rows_within(share, segment, forwards):
    """Rows on what the engine dropped at cuts of its own within this rank's pieces, in the forward and its backward.

    forwards: the engine's `Forward`s by group name. A row is one of `decay.Dropped`, and names the rank, the sequence
    and the packed token of the whole problem.
    """
    rows = []
    for name, group in share.named_groups:
        forward = forwards[name]
        for call in forward.dropped + (() if forward.saved is None else forward.saved.dropped):
            for row in call():
                n = row["sequence"]
                piece = segment.pieces[group.first + n]
                token = piece.start + row["token"] - int(group.operands.cu_seqlens[n])
                rows.append(row | {"rank": segment.rank, "sequence": piece.sequence, "token": token})
    return rows


def _bound(side, decision, dropped):
    """e^(bound of the warm-up) times a bound on the norm of what it multiplied [HV]; 0 for heads that were kept."""
    operands, options, measure = side.feeding.operands, side.options, side.engine.measure
    entering = np.linalg.norm(side.known[dropped].reshape(len(dropped), -1).astype("f8"), axis=1)
    span = warmup(operands, decision, dropped, side.direction)
    if side.direction is BACKWARD:
        rest = operands.slice_tokens(span.stop, operands.tokens)
        norm = decay.gradient_norm_bound(heads_of(rest, dropped), options,
                                         values_of(side.d_outs[side.feeding_name][span.stop:], dropped), entering,
                                         measure)
    else:
        rest = operands.slice_tokens(0, span.start)
        norm = decay.state_norm_bound(heads_of(rest, dropped), options, entering, measure)
    part = heads_of(operands.slice_tokens(span.start, span.stop), dropped)
    bound = np.zeros(operands.value_heads)
    bound[dropped] = np.exp(decay.token_bounds_sum(part, options, measure)) * norm
    return bound
