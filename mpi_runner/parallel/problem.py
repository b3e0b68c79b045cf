"""A distributed problem as one rank has it in memory: its tokens, its states, and the two calls that all ranks make."""

from dataclasses import dataclass

import numpy as np

from kda_engine.arrays import array_module, to_host

from ..clock import Clock
from . import skips
from .boundary import BACKWARD, FORWARD, Crossings
from .convolution import CHANNELS
from .share import Share
from .work import BackwardSide, ForwardSide


@dataclass
class RankForward:
    """What one rank's forward yields.

    side: outputs by group (`results`) and boundary matrices. final_states [ended,HV,K,V]: of the sequences that end
    here, NumPy. skips: the decay decisions; transitions: the route's own, for the way back.
    """

    side: ForwardSide
    final_states: np.ndarray
    skips: object
    transitions: object

    @property
    def outs(self):
        """The outputs of this rank's tokens, arrays [tokens,HV,V] that follow each other."""
        return [self.side.results[name].out for name, _ in self.side.share.named_groups]


@dataclass
class RankGradients:
    """What one rank's backward yields.

    side: gradients by group (`results`) and boundary matrices. d_initial_states [started,HV,K,V]: of the sequences
    that start here, NumPy. parameters: the gradients that all tokens share, summed over all ranks, NumPy float64 by
    name (dA_log, ddt_bias, conv/dq_weight ...). raw: with a convolution, the gradients of its inputs, dq, dk and dv.
    """

    side: BackwardSide
    d_initial_states: np.ndarray
    parameters: dict
    raw: dict

    def per_token(self, name):
        """The gradient dq, dk, dv, dg or dbeta of this rank's tokens, arrays that follow each other."""
        if name in self.raw:
            return [self.raw[name]]
        return [getattr(self.side.results[group], name) for group, _ in self.side.share.named_groups]


class RankProblem:
    """One rank's part of a problem whose sequences are cut over the ranks of `transport`.

    segments: of all ranks, the same everywhere. operands: this rank's tokens, where the engine works. route: one of
    `routes.ROUTES`. convolution: a `ShareConvolution` whose outputs q, k and v of `operands` are, or None.
    """

    def __init__(self, engine, transport, route, segments, operands, options, clock=None, convolution=None):
        self.transport, self.route, self.segments, self.options = transport, route, segments, options
        self.segment = segments[transport.rank]
        self.share = Share.of(self.segment, operands)
        self.engine, self.clock = transport.stage(engine), clock or Clock()
        self.engine_name = engine.name
        self.convolution = convolution

    def forward(self, initial_states=None, save=True):
        """The `RankForward`. Collective.

        initial_states [started,HV,K,V]: of the sequences that start here, NumPy; zeros when absent. save: keep what
        `backward` needs.
        """
        states = self._states(initial_states, len(self.segment.started), from_end=True)
        side = ForwardSide(self.engine, self.clock, self.options, self.segment, self.share, states, save=save)
        decided = None
        if self.route.summarises:
            with self.clock("summarise"):
                decided = skips.decide(self.share, self.segments, self.options, self.engine, self.transport.control,
                                       save)
        transitions = self.route.walk(side, self._crossings(FORWARD, decided), decided, self.transport, None)
        return RankForward(side, side.reached[: len(self.segment.ended)], decided, transitions)

    def backward(self, forward, d_out, d_final_states=None):
        """The `RankGradients` behind a forward with `save`. Collective.

        d_out [tokens,HV,V] where the engine works; d_final_states [ended,HV,K,V]: of the sequences that end here,
        NumPy; zeros when absent.
        """
        d_outs = {name: d_out[group.start : group.stop] for name, group in self.share.named_groups}
        states = self._states(d_final_states, len(self.segment.ended), from_end=False)
        side = BackwardSide(self.engine, self.clock, self.options, self.segment, self.share, states, d_outs=d_outs,
                            forwards=forward.side.results)
        self.route.walk(side, self._crossings(BACKWARD, forward.skips), forward.skips, self.transport,
                        forward.transitions)
        started = side.reached[len(side.reached) - len(self.segment.started) :]
        parameters, raw = self._reduce(side)
        return RankGradients(side, started, parameters, raw)

    def skip_rows(self, forward, gradients=None):
        """Rows of the report on this rank's dropped transitions, a list of dicts. It takes a second look at all decays,
        so call it when nobody waits for this rank."""
        sides = [forward.side] + ([] if gradients is None else [gradients.side])
        if forward.skips is None or self.transport.size == 1:
            return []
        return [skips.report_row(side, forward.skips) for side in sides if side.feeding is not None]

    def rows_within(self, forward):
        """Rows of the report on what the engine dropped within this rank's pieces; a second look, as `skip_rows`."""
        return skips.rows_within(self.share, self.segment, forward.side.results)

    def paths(self, forward):
        """By group of this rank's pieces, the path that the engine took, and why no faster one if there is a reason."""
        found = {name: forward.side.results[name] for name, _ in self.share.named_groups}
        return {name: {"path": result.path or self.engine_name, "reason": result.path_reason}
                for name, result in found.items()}

    def _states(self, given, count, from_end):
        """[pieces,HV,K,V] with the given states of `count` pieces at the end (or start), zeros elsewhere."""
        operands = self.share.operands
        states = np.zeros(operands.state_shape, operands.state_dtype)
        if given is not None and count:
            states[slice(len(states) - count, None) if from_end else slice(0, count)] = given
        return states

    def _crossings(self, direction, decided):
        operands = self.share.operands
        sizes = operands.value_heads, operands.K, operands.V, operands.state_dtype.itemsize
        if decided is None:
            return Crossings.exact(direction, self.segments, *sizes)
        return Crossings(direction, self.segments, *sizes, decided.kept)

    def _reduce(self, side):
        """(gradients of everything all tokens share, summed over all ranks; the convolution's input gradients)."""
        operands = self.share.operands
        HV, K = operands.value_heads, operands.K
        mine, raw = {}, {}
        of_groups = lambda name, shape: sum((getattr(g, name) for g in side.results.values()), np.zeros(shape))
        if operands.A_log is not None:
            mine["dA_log"] = of_groups("dA_log", (HV,))
        if operands.dt_bias is not None:
            mine["ddt_bias"] = of_groups("ddt_bias", (HV, K))
        if self.convolution is not None:
            for name in CHANNELS:
                with self.clock(side.direction.name):
                    dx, dweight, dbias = self.convolution.backward(name, self._rows(side, name), self.transport)
                raw["d" + name] = dx
                mine[f"conv/d{name}_weight"] = to_host(dweight)
                if dbias is not None:
                    mine[f"conv/d{name}_bias"] = to_host(dbias)
        with self.clock("reduce"):
            flat = np.concatenate([np.zeros(0)] + [x.ravel().astype("f8") for x in mine.values()])
            total = self.transport.sum(flat, "summing the parameter gradients")
        starts = np.cumsum([0] + [x.size for x in mine.values()])
        return {name: total[a : a + x.size].reshape(x.shape) for (name, x), a in zip(mine.items(), starts)}, raw

    def _rows(self, side, name):
        """The gradient of q, k or v of the whole share, the groups' one after the other."""
        parts = [getattr(side.results[group], "d" + name) for group, _ in self.share.named_groups]
        x = getattr(self.share.operands, name)
        return array_module(x).concatenate(parts) if parts else x
