"""The transfers of a distributed run, alone: checked, then timed."""

from dataclasses import replace

import numpy as np

from kda_engine.affine import Affine
from kda_engine.bench.record import OURS
from kda_engine.bench.shapes import HEAD_SIZE
from kda_engine.layout import CHUNK
from kda_engine.partition import partition

from ..clock import Clock
from ..parallel.boundary import FORWARD, Crossings
from ..parallel.routes import ROUTES
from .ranks import slowest_seconds

# How much of the state that enters a rank is left of it behind the rank: powers of it are exact.
DECAY = 0.5


class BareSide:
    """A `work.Side` of a rank of which nothing is computed: one sequence of a chunk a rank, S and M made up."""

    direction, save = FORWARD, False

    def __init__(self, segment, S, M):
        self.segment, self.clock = segment, Clock()
        self._S, self._M = S, M
        self.waiting_name = None if segment.left is None else "left"
        self.feeding_name = None if segment.right is None else "left" if segment.left is not None else "right"
        self.early = [] if self.waiting_name else ["right"]
        self.states = np.zeros((1, *S.shape), S.dtype)
        self.leaving = S

    def summarise(self, skips):
        """The pair that this rank hands out; None on the last rank."""
        return None if self.feeding_name is None else Affine(self._M, self._S)

    def run_early(self):
        """Nothing is computed."""

    def run(self, name):
        """Nothing but the state that a walk without summaries hands on."""

    def enter(self, state):
        """Keep the state that arrived."""
        self.states[0] = state

    def run_waiting(self):
        """What a rank without a summary would hand on."""
        if self.waiting_name is not None:
            self.leaving = DECAY * self.states[0] + self._S


def crossings_of(route, segments, HV):
    """Forward `Crossings` with every transition; with none for a route that carries no others."""
    every = Crossings.exact(FORWARD, segments, HV, HEAD_SIZE, HEAD_SIZE, 4)
    return every if route.covers(every) else replace(every, kept=np.zeros_like(every.kept))


class BoundaryExchange:
    """A route's forward: the states of one sequence that spans all ranks to where they are waited for."""

    def __init__(self, route, transport, HV):
        self.name, self.route, self.transport = route.name, route, transport
        segments = partition(np.array([0, transport.size * CHUNK]), transport.size)
        self.crossings = crossings_of(route, segments, HV)
        S = np.full((HV, HEAD_SIZE, HEAD_SIZE), 1.0 + transport.rank, "f4")
        M = None
        if self.crossings.kept[transport.rank].any():
            M = np.zeros_like(S)
            M[:] = DECAY * np.eye(HEAD_SIZE, dtype="f4")
        self._make_side = lambda: BareSide(segments[transport.rank], S, M)

    def run(self):
        """The state that has arrived here."""
        side = self._make_side()
        self.route.walk(side, self.crossings, None, self.transport, None)
        return side.states[0]

    def right(self, state):
        """Whether it is what the ranks before made of it."""
        expected = 0.0
        for rank in range(self.transport.rank):
            passed = self.crossings.kept[rank].any() or not self.route.summarises
            expected = DECAY * expected * passed + 1.0 + rank
        return np.allclose(state, expected, rtol=1e-6, atol=0)


class ParameterSum:
    """The sum of dA_log [HV] and ddt_bias [HV,K] over all ranks, in float64."""

    name = "allreduce"

    def __init__(self, transport, HV):
        self.transport = transport
        self.mine = np.full(HV * (1 + HEAD_SIZE), 1.0 + transport.rank)

    def run(self):
        """The sum."""
        return self.transport.sum(self.mine, "summing parameter gradients")

    def right(self, total):
        """Whether it is the sum of what all ranks gave."""
        return np.all(total == self.transport.size * (self.transport.size + 1) / 2)


def measure_exchanges(transport, heads, samples):
    """A record's rows: every transfer with every number of value heads. Collective.

    A case that went wrong on any rank has no samples.
    """
    rows = [_measure(BoundaryExchange(route, transport, HV), HV, samples) for route in ROUTES.values() for HV in heads]
    return rows + [_measure(ParameterSum(transport, HV), HV, samples) for HV in heads]


def _measure(transfer, HV, samples):
    transport, control = transfer.transport, transfer.transport.control
    before = transport.sent
    wrong = control.largest(int(not transfer.right(transfer.run())), "checking the transfer")
    sent = control.largest(transport.sent - before, "counting bytes")
    row = {
        "case": {"what": transfer.name, "transport": transport.name, "ranks": transport.size, "heads": HV},
        "problem": {"head_size": HEAD_SIZE, "dtype": "float32"}, "error": float(wrong), "allowed": 0.0, "bytes": sent,
    }
    if not wrong:
        row["samples"] = {OURS: slowest_seconds(control, transfer.run, samples)}
    return row
