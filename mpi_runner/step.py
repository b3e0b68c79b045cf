"""The distributed forward and backward of one rank's share: summarise, exchange, scan, compute.

Whatever does not wait for the exchange is computed while it is under way.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kda_engine import decay, scan
from kda_engine.affine import Affine
from kda_engine.layout import CHUNK
from kda_engine.partition import chain

from .boundary import Boundaries


@dataclass
class ShareResult:
    """What one rank's share yields, group by group, and the states and boundaries behind it.

    forwards, gradients: by group name. final_state, d_initial_state [pieces,HV,K,V]. boundary: name -> array of this
    rank's own pair (M, S, D) where it has one, and the states it scanned (S_in, dS_out). skips: calls that give a
    report row each; their bounds go over all tokens again, while nobody waits for this rank.
    """

    forwards: dict = field(default_factory=dict)
    gradients: dict = field(default_factory=dict)
    final_state: np.ndarray | None = None
    d_initial_state: np.ndarray | None = None
    boundary: dict = field(default_factory=dict)
    skips: list = field(default_factory=list)


class Step:
    """One rank's walk through forward and backward. Engine, exchange and partition are the caller's."""

    def __init__(self, engine, exchange, clock, segments, options, route, with_backward):
        self.engine, self.exchange, self.clock = engine, exchange, clock
        self.segments, self.options = segments, options
        self.serial = route == "serial"
        self.with_backward = with_backward
        self.rank = exchange.rank
        self.segment = segments[self.rank]
        self.result = ShareResult()

    def forward(self, share, states):
        """Forward of the share; states [pieces,HV,K,V]: the initial state of every piece that starts here.

        The row of the piece that continues from the left is filled in here.
        """
        self.share, self.states = share, states
        self.result.final_state = np.empty_like(states)
        if self.serial:
            self._forward_serial()
        else:
            self._forward_gathered()
        return self.result

    def backward(self, d_outs, d_states):
        """Backward after `forward`; d_outs: by group name, [tokens,HV,V]; d_states [pieces,HV,K,V]: the gradient of
        the final state of every piece that ends here. The row of the piece that goes on is filled in here.
        """
        self.d_outs, self.d_states = d_outs, d_states
        self.result.d_initial_state = np.empty_like(d_states)
        if self.serial:
            self._backward_serial()
        else:
            self._backward_gathered()
        return self.result

    # Route A: every rank waits for its neighbour's boundary and hands on its own.

    def _forward_serial(self):
        sending = []
        if self.share.right is not None:
            self._run_forward("right")
            sending += self._hand_on(self.result.final_state[-1], +1)
        if self.share.inner is not None:
            self._run_forward("inner")
        if self.share.left is not None:
            with self.clock("gather"):
                self.states[0] = self._receive(self.segment.left, -1)
            self._keep_boundary(S_in=self.states[0])
            self._run_forward("left")
            if self.segment.right is self.segment.left:
                sending += self._hand_on(self.result.final_state[0], +1)
        self._finish(sending)

    def _backward_serial(self):
        sending = []
        if self.share.left is not None and self.segment.right is not self.segment.left:
            self._run_backward("left")
            sending += self._hand_on(self.result.d_initial_state[0], -1)
        if self.share.inner is not None:
            self._run_backward("inner")
        if self.segment.right is not None:
            with self.clock("gather"):
                self.d_states[-1] = self._receive(self.segment.right, +1)
            self._keep_boundary(dS_out=self.d_states[-1])
            self._run_backward("left" if self.segment.right is self.segment.left else "right")
            if self.segment.right is self.segment.left:
                sending += self._hand_on(self.result.d_initial_state[0], -1)
        self._finish(sending)

    def _neighbour(self, piece, direction):
        ranks = chain(self.segments, piece.sequence)
        return ranks[ranks.index(self.rank) + direction]

    def _hand_on(self, state, direction):
        piece = self.segment.right if direction > 0 else self.segment.left
        with self.clock("gather"):
            return self.exchange.start_send(np.ascontiguousarray(state), self._neighbour(piece, direction))

    def _receive(self, piece, direction):
        source = self._neighbour(piece, direction)
        return self.exchange.receive(self.states.shape[1:], self.states.dtype, source, "the neighbour's boundary state")

    def _finish(self, sending):
        with self.clock("gather"):
            for request in sending:
                self.exchange.wait(request, "handing on the boundary state")

    # Route B: all boundary pairs to all ranks, then each scans for itself.

    def _forward_gathered(self):
        passing = self.segment.left is not None and self.segment.right is self.segment.left
        feeding = self.share.left if passing else self.share.right
        with self.clock("summarise"):
            self.ahead = self._decision(feeding if self.segment.right is not None else None, backward=False)
            self.back = self._decision(self.share.left if self.with_backward else None, backward=True)
            fallback = _either(self.ahead, self.back) if passing else None
            self.boundaries = self._plan(fallback)
            self.kept = self.boundaries.kept[self.rank]
            pair = None
            if self.segment.right is not None:
                state = np.zeros_like(self.states[:1]) if passing else self.states[-1:]
                pair = self._summary(feeding.operands, state, passing, self.ahead)
                self._keep_boundary(M=pair.M, S=pair.S)
        with self.clock("gather"):
            gather = self.exchange.start_gather(self.boundaries.pack(self.rank, pair), self.boundaries.lengths,
                                                "gathering the boundary states")
        for name in ("right", "inner"):
            if getattr(self.share, name) is not None:
                self._run_forward(name)
        with self.clock("gather"):
            self.contributions = gather.wait()
        if self.share.left is not None:
            with self.clock("scan"):
                pairs = self.boundaries.before(self.rank, self.segment.left.sequence, self.contributions)
                self.states[0] = scan.prefix(pairs, np.zeros_like(self.states[0]))[-1]
                self._keep_boundary(S_in=self.states[0])
            self._run_forward("left")
        if self.segment.right is not None:
            self.result.skips.append(partial(self._skip_row, feeding, self.segment.right, self.ahead, self.states[-1],
                                             backward=False))

    def _backward_gathered(self):
        passing = self.segment.left is not None and self.segment.right is self.segment.left
        segments, sends = self.segments, np.array([s.left is not None for s in self.segments])
        nothing = np.zeros((len(segments), self.states.shape[1]), bool)
        plan = Boundaries(segments, self.states.shape[1:], self.states.dtype, sends, nothing)
        with self.clock("summarise"):
            pair = None
            if self.share.left is not None:
                boundary = np.zeros_like(self.d_states[:1]) if passing else self.d_states[:1]
                D = self._summary_backward(self.share.left.operands, self.d_outs["left"], boundary, passing)
                pair = Affine(None, D)
                self._keep_boundary(D=D)
        with self.clock("gather"):
            gather = self.exchange.start_gather(plan.pack(self.rank, pair), plan.lengths,
                                                "gathering the boundary gradients")
        if self.share.inner is not None:
            self._run_backward("inner")
        if self.share.left is not None and not passing:
            self._run_backward("left")
        with self.clock("gather"):
            contributions = gather.wait()
        if self.segment.right is not None:
            with self.clock("scan"):
                # D travels alone: the transitions are the forward's own.
                sequence = self.segment.right.sequence
                pairs = [Affine(self.boundaries.transition(r, self.contributions), plan.unpack(r, contributions[r]).S)
                         for r in chain(self.segments, sequence) if r > self.rank]
                self.d_states[-1] = scan.suffix(pairs, np.zeros_like(self.d_states[-1]))[0]
                self._keep_boundary(dS_out=self.d_states[-1])
            self._run_backward("left" if passing else "right")
        if self.share.left is not None:
            self.result.skips.append(partial(self._skip_row, self.share.left, self.segment.left, self.back,
                                             self.d_states[0], backward=True))

    def _decision(self, group, backward):
        return None if group is None else decay.decide(group.operands, self.options, backward, self.engine.measure)

    def _plan(self, fallback):
        """The forward exchange. fallback [HV] bool: heads of this rank's passing piece that keep their transition."""
        segments, HV = self.segments, self.states.shape[1]
        passing = [s.left is not None and s.right is s.left for s in segments]
        kept = np.zeros((len(segments), HV), bool)
        kept[passing] = True
        if self.options.skip != "exact" and any(passing):
            mine = np.zeros(HV, np.uint8) if fallback is None else fallback.astype(np.uint8)
            gather = self.exchange.start_gather(mine, [HV] * len(segments), "gathering the decay decisions")
            kept = np.array(gather.wait()).astype(bool)
        sends = np.array([s.right is not None for s in segments])
        return Boundaries(segments, self.states.shape[1:], self.states.dtype, sends, kept)

    def _summary(self, operands, state, passing, decision):
        """The pair of a piece that goes on: whole, or from the warm-up alone for heads whose past is dropped."""
        kept = np.flatnonzero(self.kept if passing else decision.fallback)
        dropped = np.setdiff1d(np.arange(operands.value_heads), kept)
        S = np.empty(state.shape[1:], state.dtype)
        M = np.zeros(state.shape[1:3] + state.shape[2:3], state.dtype) if passing and len(kept) else None
        if len(kept):
            part = self.engine.summarise(_heads(operands, kept), self.options, state[:, kept], transition=passing)
            S[kept] = part.S[0]
            if passing:
                M[kept] = part.M[0]
        if len(dropped):
            start = warmup_start(operands, decision, dropped)
            tail = operands.slice_tokens(start, operands.tokens)
            entering = state[:, dropped] if start == 0 else np.zeros_like(state[:, dropped])
            S[dropped] = self.engine.summarise(_heads(tail, dropped), self.options, entering, transition=False).S[0]
        return Affine(M, S)

    def _summary_backward(self, operands, d_out, d_state, passing):
        """D of a piece that came from the left, whole or from its warm-up at the start."""
        kept = np.flatnonzero(self.kept if passing else self.back.fallback)
        dropped = np.setdiff1d(np.arange(operands.value_heads), kept)
        D = np.empty(d_state.shape[1:], d_state.dtype)
        if len(kept):
            D[kept] = self.engine.summarise_backward(_heads(operands, kept), self.options, _of_heads(d_out, kept),
                                                     d_state[:, kept])[0]
        if len(dropped):
            stop = warmup_stop(operands, self.back, dropped)
            head = operands.slice_tokens(0, stop)
            leaving = d_state[:, dropped] if stop == operands.tokens else np.zeros_like(d_state[:, dropped])
            D[dropped] = self.engine.summarise_backward(_heads(head, dropped), self.options,
                                                        _of_heads(d_out[:stop], dropped), leaving)[0]
        return D

    def _skip_row(self, group, piece, decision, boundary, backward):
        """One report row: which heads' past was dropped, and the bound on what that cost."""
        operands = group.operands
        passing = piece.from_left and piece.to_right
        kept = self.kept if passing else decision.fallback
        dropped = np.flatnonzero(~kept)
        HV = operands.value_heads
        row = {
            "direction": "backward" if backward else "forward", "rank": self.rank, "sequence": piece.sequence,
            "tokens": [piece.start, piece.stop], "rule": self.options.skip,
            "num_warmup": decision.num_warmup.tolist(), "fallback": kept.tolist(),
            "log_norm": decision.log_norm.tolist(), "bound": [0.0] * HV, "log_transition": [0.0] * HV,
        }
        if self.options.skip == "certified":
            # A rule that looked at every token for every head has this sum already.
            whole = (decision.log_norm if decision.fallback.all()
                     else decay.token_bounds_sum(operands, self.options, self.engine.measure))
            row["log_transition"] = whole.tolist()
            if len(dropped):
                row["bound"] = self._bound(group, decision, dropped, boundary, backward).tolist()
        return row

    def _bound(self, group, decision, dropped, boundary, backward):
        """e^(bound of the warm-up) times a bound on the norm of what it multiplied [HV]; 0 for heads that were kept."""
        operands, options, measure = group.operands, self.options, self.engine.measure
        entering = np.linalg.norm(boundary[dropped].reshape(len(dropped), -1).astype("f8"), axis=1)
        if backward:
            stop = warmup_stop(operands, decision, dropped)
            warmup = operands.slice_tokens(0, stop)
            rest = operands.slice_tokens(stop, operands.tokens)
            norm = decay.gradient_norm_bound(_heads(rest, dropped), options,
                                             _of_heads(self.d_outs["left"][stop:], dropped), entering, measure)
        else:
            start = warmup_start(operands, decision, dropped)
            warmup = operands.slice_tokens(start, operands.tokens)
            rest = operands.slice_tokens(0, start)
            norm = decay.state_norm_bound(_heads(rest, dropped), options, entering, measure)
        bound = np.zeros(operands.value_heads)
        bound[dropped] = np.exp(decay.token_bounds_sum(_heads(warmup, dropped), options, measure)) * norm
        return bound

    def _run_forward(self, name):
        group = getattr(self.share, name)
        with self.clock("forward"):
            result = self.engine.forward(group.operands, self.options, self.states[group.first : group.last],
                                         self.with_backward)
        self.result.forwards[name] = result
        self.result.final_state[group.first : group.last] = result.final_state

    def _run_backward(self, name):
        group = getattr(self.share, name)
        with self.clock("backward"):
            gradients = self.engine.backward(self.result.forwards[name].saved, self.d_outs[name],
                                             self.d_states[group.first : group.last])
        self.result.gradients[name] = gradients
        self.result.d_initial_state[group.first : group.last] = gradients.d_initial_state

    def _keep_boundary(self, **named):
        self.result.boundary.update({name: x for name, x in named.items() if x is not None})


def _either(ahead, back):
    return ahead.fallback if back is None else ahead.fallback | back.fallback


def _heads(operands, heads):
    """Some heads of a problem; the problem itself when they are all there."""
    return operands if len(heads) == operands.value_heads else operands.take_heads(heads)


def _of_heads(x, heads):
    """Some heads of a tensor [T,HV,V]; the tensor itself when they are all there, for copies take milliseconds."""
    return x if len(heads) == x.shape[1] else x[:, heads]


def warmup_start(operands, decision, dropped):
    """First token of the warm-up: the longest that any dropped head asks for."""
    chunks = -(-operands.tokens // CHUNK)
    return (chunks - int(decision.num_warmup[dropped].max())) * CHUNK


def warmup_stop(operands, decision, dropped):
    """The token behind the warm-up at the start of a piece, of the same length."""
    return min(int(decision.num_warmup[dropped].max()) * CHUNK, operands.tokens)
