"""A distributed problem as one rank has it in memory: its tokens, its states, and the two calls that all ranks make."""

from dataclasses import dataclass

import numpy as np

from kda_engine.arrays import array_module, to_host
from kda_engine.errors import InputError

from ..clock import Clock
from . import skips
from .boundary import BACKWARD, FORWARD, Crossings
from .convolution import CHANNELS
from .folding import FoldingEngine, cut
from .rates import TYPICAL
from .routes import ROUTES
from .routes.choice import choose
from .routes.fold import Fold
from .share import Share
from .work import BackwardSide, ForwardSide


class UnsuitableScan(InputError):
    """The scan that was asked for cannot carry this run; every rank raises it at the same place."""


@dataclass
class RankForward:
    """What one rank's forward yields.

    side: outputs by group (`results`) and boundary matrices. final_states [ended,HV,K,V]: of the sequences that end
    here, NumPy. route: by which it went; skips: the decay decisions; transitions: the route's own, for the way back.
    """

    side: ForwardSide
    final_states: np.ndarray
    route: object
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

    scan: "auto" or a name of `routes.ROUTES`. segments: of all ranks, the same everywhere. operands: this rank's
    tokens, where the engine works. convolution: a `ShareConvolution` whose outputs q, k and v of `operands` are, or
    None. nodes: by rank the name of its machine; asked for when absent. piece_length: tokens of the pieces by which
    results do not depend on the ranks (`folding`), None for results within rounding; cuts lie between such pieces then,
    the engine works on the host, and the scan is auto, chain or serial.

    route, reason: the route that the last forward took, and why. On construction collective.
    """

    def __init__(self, engine, transport, scan, segments, operands, options, clock=None, convolution=None, nodes=None,
                 piece_length=None):
        self.transport, self.scan, self.segments, self.options = transport, scan, segments, options
        self.route, self.reason, self.piece_length = ROUTES.get(scan), "asked for", piece_length
        if piece_length is not None:
            engine = FoldingEngine(engine, piece_length)
            if scan != "serial":
                self.route, self.reason = Fold(), "the order of the pieces is kept"
        self.nodes = transport.control.nodes() if nodes is None else tuple(nodes)
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
        if self.route is None or self.route.summarises:
            with self.clock("summarise"):
                decided = skips.decide(self.share, self.segments, self.options, self.engine, self.transport.control,
                                       save)
        crossings = self.crossings(FORWARD, decided)
        if self.route is None or self.scan == "auto" and self.piece_length is None:
            self.route, self.reason = choose(crossings, TYPICAL)
        elif not self.route.covers(crossings):
            raise UnsuitableScan(f"scan: {self.scan!r} needs a run in which no rank's transition matters, and in this "
                                 "run one does; choose auto, or a decay skip that drops it")
        transitions = self.route.walk(side, crossings, decided, self.transport, None)
        return RankForward(side, side.reached[: len(self.segment.ended)], self.route, decided, transitions)

    def backward(self, forward, d_out, d_final_states=None):
        """The `RankGradients` behind a forward with `save`. Collective.

        d_out [tokens,HV,V] where the engine works; d_final_states [ended,HV,K,V]: of the sequences that end here,
        NumPy; zeros when absent.
        """
        d_outs = {name: d_out[group.start : group.stop] for name, group in self.share.named_groups}
        states = self._states(d_final_states, len(self.segment.ended), from_end=False)
        side = BackwardSide(self.engine, self.clock, self.options, self.segment, self.share, states, d_outs=d_outs,
                            forwards=forward.side.results)
        forward.route.walk(side, self.crossings(BACKWARD, forward.skips), forward.skips, self.transport,
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

    def crossings(self, direction, decided):
        """The `Crossings` of one direction with the decisions of `skips.decide`, None for those that drop nothing."""
        operands = self.share.operands
        sizes = operands.value_heads, operands.K, operands.V, operands.state_dtype.itemsize
        if decided is None:
            return Crossings.exact(direction, self.segments, *sizes, self.nodes)
        return Crossings(direction, self.segments, *sizes, decided.kept, self.nodes)

    def _reduce(self, side):
        """(gradients of everything all tokens share, summed over all ranks; the convolution's input gradients)."""
        operands = self.share.operands
        HV, K = operands.value_heads, operands.K
        mine, raw = {}, {}

        def of_groups(name, shape):
            of_each = [getattr(side.results[group], name) for group, _ in self.share.named_groups]
            if self.piece_length is None:
                return sum(of_each, np.zeros(shape))
            return np.concatenate([np.zeros((0, *shape)), *of_each])

        if operands.A_log is not None:
            mine["dA_log"] = of_groups("dA_log", (HV,))
        if operands.dt_bias is not None:
            mine["ddt_bias"] = of_groups("ddt_bias", (HV, K))
        if self.convolution is not None:
            for name in CHANNELS:
                with self.clock(side.direction.name):
                    dx, dweight, dbias = self.convolution.backward(name, self._rows(side, name), self.transport,
                                                                   self._pieces())
                raw["d" + name] = dx
                mine[f"conv/d{name}_weight"] = to_host(dweight)
                if dbias is not None:
                    mine[f"conv/d{name}_bias"] = to_host(dbias)
        with self.clock("reduce"):
            if self.piece_length is not None:
                return {name: self._sum_of_pieces(x.astype("f8"), name) for name, x in mine.items()}, raw
            flat = np.concatenate([np.zeros(0)] + [x.ravel().astype("f8") for x in mine.values()])
            total = self.transport.sum(flat, "summing the parameter gradients")
        starts = np.cumsum([0] + [x.size for x in mine.values()])
        return {name: total[a : a + x.size].reshape(x.shape) for (name, x), a in zip(mine.items(), starts)}, raw

    def _pieces(self):
        """The pieces of this rank, a list of spans for each of its sequences; None where there are none."""
        if self.piece_length is None:
            return None
        return cut(self.share.operands.cu_seqlens, self.piece_length)

    def _sum_of_pieces(self, rows, name):
        """The sum of rows [pieces of this rank, ...] over all pieces of all ranks, one after the other."""
        lengths = self.transport.control.collect(rows.size, f"summing {name}")
        parts = self.transport.gather(np.ascontiguousarray(rows).reshape(-1), lengths, f"summing {name}")
        total = np.zeros(rows.shape[1:])
        for part in parts:
            for row in part.reshape(-1, *total.shape):
                total += row
        return total

    def _rows(self, side, name):
        """The gradient of q, k or v of the whole share, the groups' one after the other."""
        parts = [getattr(side.results[group], "d" + name) for group, _ in self.share.named_groups]
        x = getattr(self.share.operands, name)
        return array_module(x).concatenate(parts) if parts else x
