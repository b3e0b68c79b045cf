"""The transfers of a distributed run, alone: checked, then timed."""

import numpy as np

from kda_engine.affine import Affine
from kda_engine.bench.record import OURS
from kda_engine.bench.shapes import HEAD_SIZE
from kda_engine.layout import CHUNK
from kda_engine.partition import partition

from ..boundary import Boundaries
from .ranks import slowest_seconds


class BoundaryGather:
    """Route B's forward: the boundary pairs of one sequence that spans all ranks, to all ranks."""

    name = "allgather"

    def __init__(self, exchange, HV):
        self.exchange = exchange
        R = exchange.size
        segments = partition(np.array([0, R * CHUNK]), R)
        passing = np.array([s.left is not None and s.right is not None for s in segments])
        kept = np.repeat(passing[:, None], HV, axis=1)
        sends = np.array([s.right is not None for s in segments])
        self.plan = Boundaries(segments, (HV, HEAD_SIZE, HEAD_SIZE), np.dtype("f4"), sends, kept)
        self.mine = self._contribution(exchange.rank)

    def run(self):
        """All ranks' contributions."""
        return self.exchange.start_gather(self.mine, self.plan.lengths, "gathering boundaries").wait()

    def right(self, contributions):
        """Whether this rank got what every rank sent."""
        return all(np.array_equal(x, self._contribution(rank)) for rank, x in enumerate(contributions))

    def _contribution(self, rank):
        HV, K, V = self.plan.HV, self.plan.K, self.plan.V
        return self.plan.pack(rank, Affine(_values(rank, HV, K, K), _values(rank, HV, K, V)))


class NeighbourHandOn:
    """Route A's forward: the boundary state from the first rank to the last, each waiting for the one before."""

    name = "serial"

    def __init__(self, exchange, HV):
        self.exchange, self.shape = exchange, (HV, HEAD_SIZE, HEAD_SIZE)
        self.first = _values(0, *self.shape)

    def run(self):
        """The state that has arrived here."""
        exchange, state = self.exchange, self.first
        if exchange.rank > 0:
            state = exchange.receive(self.shape, np.dtype("f4"), exchange.rank - 1, "the neighbour's state")
        if exchange.rank + 1 < exchange.size:
            for request in exchange.start_send(state, exchange.rank + 1):
                exchange.wait(request, "handing on the state")
        return state

    def right(self, state):
        """Whether the first rank's state has come through."""
        return np.array_equal(state, self.first)


class ParameterSum:
    """The sum of dA_log [HV] and ddt_bias [HV,K] over all ranks, in float64."""

    name = "allreduce"

    def __init__(self, exchange, HV):
        self.exchange = exchange
        self.mine = np.full(HV * (1 + HEAD_SIZE), 1.0 + exchange.rank)

    def run(self):
        """The sum."""
        return self.exchange.sum(self.mine, "summing parameter gradients")

    def right(self, total):
        """Whether it is the sum of what all ranks gave."""
        return np.all(total == self.exchange.size * (self.exchange.size + 1) / 2)


TRANSFERS = (BoundaryGather, NeighbourHandOn, ParameterSum)


def measure_exchanges(exchange, transport, heads, samples):
    """A record's rows: every transfer with every number of value heads. Collective.

    A case that went wrong on any rank has no samples.
    """
    return [_measure(transfer(exchange, HV), transport, HV, samples) for transfer in TRANSFERS for HV in heads]


def _measure(transfer, transport, HV, samples):
    exchange = transfer.exchange
    before = exchange.sent
    wrong = exchange.largest(int(not transfer.right(transfer.run())), "checking the transfer")
    sent = exchange.largest(exchange.sent - before, "counting bytes")
    row = {
        "case": {"what": transfer.name, "transport": transport, "ranks": exchange.size, "heads": HV},
        "problem": {"head_size": HEAD_SIZE, "dtype": "float32"}, "error": float(wrong), "allowed": 0.0, "bytes": sent,
    }
    if not wrong:
        row["samples"] = {OURS: slowest_seconds(exchange, transfer.run, samples)}
    return row


def _values(rank, *shape):
    """Rising numbers that tell the rank, exact in float32."""
    return (np.arange(int(np.prod(shape)), dtype="f4") % 4096 + 4096 * rank).reshape(shape)
