"""What one rank can do with its share in one direction: summarise the piece that feeds others, run a group, take in the
state that it waited for. In which order, and what crosses ranks between, is a route's affair.
"""

import numpy as np

from kda_engine.affine import Affine

from .boundary import BACKWARD, FORWARD, passes
from .warmup import heads_of, values_of, warmup


class Side:
    """One direction of a rank's work.

    states [pieces,HV,K,V]: what enters each piece in this direction (forward: states, backward: gradients); the row of
    the piece that waits is filled by `enter`. reached: what leaves each piece, filled by `run`. results: by group
    name. boundary: the matrices at this rank's cuts by the names of the output file.

    waiting_name, feeding_name: the groups of the piece that waits and of the piece that feeds others, None where there
    is none; where a piece passes right through, they are the same.
    """

    def __init__(self, engine, clock, options, segment, share, states):
        self.engine, self.clock, self.options = engine, clock, options
        self.segment, self.share, self.states = segment, share, states
        self.reached = np.empty_like(states)
        self.results, self.boundary = {}, {}
        waits, feeds = self.direction.waits(segment), self.direction.feeds(segment)
        self.waiting_name = None if waits is None else self._group_of(self._waiting_end)
        self.feeding_name = None if feeds is None else self._group_of(self._feeding_end)

    def _group_of(self, end):
        return "left" if passes(self.segment) else end

    @property
    def feeding(self):
        """The `Group` of the piece that feeds others, None where there is none."""
        return None if self.feeding_name is None else getattr(self.share, self.feeding_name)

    @property
    def known(self):
        """The state [HV,K,V] that enters the piece that feeds others; zero before `enter` where it passes through."""
        return self.states[self._feeding_row]

    @property
    def early(self):
        """Groups that wait for nobody, the one that others wait for first."""
        there = [name for name, _ in self.share.named_groups if name != self.waiting_name]
        return sorted(there, key=lambda name: name != self.feeding_name)

    def run_early(self):
        """Run what waits for nobody."""
        for name in self.early:
            self.run(name)

    def run_waiting(self):
        """Run the piece that waited, if there is one."""
        if self.waiting_name is not None:
            self.run(self.waiting_name)

    def enter(self, state):
        """Take in the state [HV,K,V] that this rank waited for."""
        self.states[self._waiting_row] = state
        self.boundary[self._entering_name] = self.states[self._waiting_row]

    @property
    def leaving(self):
        """The state [HV,K,V] that a group which has been run hands on."""
        return self.reached[self._feeding_row]

    def run(self, name):
        """Everything of one group from the states that enter it."""
        group = getattr(self.share, name)
        with self.clock(self.direction.name):
            result, reached = self._run(name, group, self.states[group.first : group.last])
        self.results[name] = result
        self.reached[group.first : group.last] = reached

    def summarise(self, skips):
        """The `Affine` of the piece that feeds others, in the direction of travel; None where there is none.

        S is the state reached from what is known to enter, or from zero; M is None unless the piece waits itself, and
        zero for heads whose past is dropped: those are summarised from their warm-up alone.
        """
        if self.feeding is None:
            return None
        operands, passing = self.feeding.operands, passes(self.segment)
        known = self.known[None]
        state = np.zeros_like(known) if passing else known
        kept = np.flatnonzero(skips.kept_heads(self.direction, self.segment))
        dropped = np.setdiff1d(np.arange(operands.value_heads), kept)
        S = np.empty(state.shape[1:], state.dtype)
        M = None
        if len(kept):
            part = self._summary(slice(0, operands.tokens), kept, state[:, kept], passing)
            S[kept] = part.S[0]
            if part.M is not None:
                M = np.zeros(state.shape[1:3] + state.shape[2:3], state.dtype)
                M[kept] = part.M[0]
        if len(dropped):
            span = warmup(operands, skips.decisions[self.direction], dropped, self.direction)
            whole = span == slice(0, operands.tokens)
            entering = state[:, dropped] if whole else np.zeros_like(state[:, dropped])
            S[dropped] = self._summary(span, dropped, entering, False).S[0]
        pair = Affine(M, S)
        self.boundary.update({name: x for name, x in zip(self._pair_names, (S, M)) if x is not None})
        return pair


class ForwardSide(Side):
    """save: keep what the backward needs."""

    direction = FORWARD
    _waiting_end, _feeding_end, _waiting_row, _feeding_row = "left", "right", 0, -1
    _entering_name, _pair_names = "S_in", ("S", "M")

    def __init__(self, *given, save):
        super().__init__(*given)
        self.save = save

    def _run(self, name, group, states):
        result = self.engine.forward(group.operands, self.options, states, self.save)
        return result, result.final_state

    def steps(self):
        """With a `FoldingEngine`, the `Affine`s of all pieces of the piece that feeds others, in the order of travel."""
        return self.engine.steps(self.feeding.operands, self.options)[-1]

    def _summary(self, span, heads, state, transition):
        operands = self.feeding.operands
        if span != slice(0, operands.tokens):
            operands = operands.slice_tokens(span.start, span.stop)
        return self.engine.summarise(heads_of(operands, heads), self.options, state, transition)


class BackwardSide(Side):
    """d_outs: gradients of the outputs by group name, [tokens,HV,V]. forwards: of the `ForwardSide`, its results."""

    direction = BACKWARD
    _waiting_end, _feeding_end, _waiting_row, _feeding_row = "right", "left", -1, 0
    _entering_name, _pair_names = "dS_out", ("D", "M")

    def __init__(self, *given, d_outs, forwards):
        super().__init__(*given)
        self.d_outs, self.forwards = d_outs, forwards

    def _run(self, name, group, states):
        result = self.engine.backward(self.forwards[name].saved, self.d_outs[name], states)
        return result, result.d_initial_state

    def steps(self):
        """With a `FoldingEngine`, the same of the gradients."""
        return self.engine.d_steps(self.forwards[self.feeding_name].saved, self.d_outs[self.feeding_name])[0][::-1]

    def _summary(self, span, heads, state, transition):
        # The transitions are the forward's own, so none is made here.
        operands, d_out = self.feeding.operands, self.d_outs[self.feeding_name]
        if span != slice(0, operands.tokens):
            operands, d_out = operands.slice_tokens(span.start, span.stop), d_out[span]
        D = self.engine.summarise_backward(heads_of(operands, heads), self.options, values_of(d_out, heads), state)
        return Affine(None, D)
