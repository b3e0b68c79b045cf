"""Routes on which every rank condenses its share first: the walk that they share, and messages between neighbours.

Along a chain of ranks some heads need a scan, because some rank's transition matters for them. The state of all other
heads is known from the tokens of the rank before, so it takes one message, whatever the number of ranks.
"""

from dataclasses import dataclass

import numpy as np

from kda_engine.affine import Affine

from ..boundary import FORWARD, Chain, Direction
from .route import Route


class Together:
    """Generators that yield lists of requests: each goes on when its requests are done, in no fixed order.

    values: what they returned. Looks like a request itself, so that a rank can let them go on while it works.
    """

    def __init__(self, walks):
        self.values, self._walks, self._waiting = [None] * len(walks), walks, {}
        for number in range(len(walks)):
            self._go_on(number)

    def Test(self):
        """Let all go on that can; whether all have ended."""
        for number, requests in list(self._waiting.items()):
            if all([request.Test() for request in requests]):
                self._go_on(number)
        return not self._waiting

    def _go_on(self, number):
        self._waiting.pop(number, None)
        try:
            self._waiting[number] = next(self._walks[number])
        except StopIteration as end:
            self.values[number] = end.value


class Link:
    """Messages of one rank along one chain of heads, packed; buffers stay from call to call.

    name: of the chain on this rank, for its buffers.
    """

    def __init__(self, transport, name, dtype, K, V):
        self.transport, self.name, self.dtype, self.K, self.V = transport, name, dtype, K, V

    def states(self, name, heads):
        """Room for the states of so many heads [heads,K,V]."""
        return self.transport.buffer(f"{self.name} {name}", (heads, self.K, self.V), self.dtype)

    def send(self, name, to, S, M=None, kept=None):
        """Begin to send S [h,K,V] and of M [h,K,K] the heads of kept [h]; the requests."""
        moves = 0 if M is None else int(kept.sum())
        flat = self.transport.buffer(f"{self.name} {name}", (S.size + moves * self.K**2,), self.dtype)
        flat[: S.size] = S.reshape(-1)
        if moves:
            flat[S.size :] = M[kept].reshape(-1)
        return self.transport.start_send(flat, to)

    def receive(self, name, source, heads, kept=None):
        """Begin to receive what `send` sends of so many heads; (requests, a function that unpacks them as `Affine`).

        Heads that send no transition get a zero one; M is None where no head sends one.
        """
        K, V, moves = self.K, self.V, 0 if kept is None else int(kept.sum())
        flat = self.transport.buffer(f"{self.name} {name}", (heads * K * V + moves * K * K,), self.dtype)

        def unpack():
            S = flat[: heads * K * V].reshape(heads, K, V)
            if not moves:
                return Affine(None, S)
            M = np.zeros((heads, K, K), self.dtype)
            M[kept] = flat[heads * K * V :].reshape(moves, K, K)
            return Affine(M, S)

        return self.transport.start_receive(flat, source), unpack


@dataclass(frozen=True)
class Trip:
    """One rank's part in the scan along one chain of heads.

    pair: this position's `Affine` of the chain's heads in the direction of travel, None at the last position. before:
    what this rank put into `found` of the same sequence on the way forward. found: None where no backward follows.
    """

    chain: Chain
    position: int
    pair: Affine | None
    link: Link
    direction: Direction
    before: object
    found: dict | None
    common: object

    @property
    def rank(self):
        return self.chain.ranks[self.position]


class Scanned(Route):
    """A route of which `travel` is the scan along one chain."""

    def walk(self, side, crossings, skips, transport, transitions):
        rank, clock, direction = side.segment.rank, side.clock, side.direction
        with clock("summarise"):
            pair = side.summarise(skips)
        if direction is not FORWARD and pair is not None:
            pair = self._with_transition(pair, side.segment, transitions)
        found = None
        if direction is FORWARD and side.save:
            found = {"own": None if pair is None else pair.M}
        with clock("gather"):
            common = self.start(crossings, rank, pair, transport, side.states.dtype)
            walks, mine = [], [chain for chain in crossings.chains if rank in chain.ranks]
            for number, chain in enumerate(mine):
                link = Link(transport, f"{direction.name} {number}", side.states.dtype, crossings.K, crossings.V)
                before = None if transitions is None else transitions.get(chain.sequence)
                walks.append(self._along(chain, chain.ranks.index(rank), pair, link, direction, before, found, common))
            together = Together(walks)
            transport.control.watch(together)
        side.run_early()
        with clock("gather"):
            transport.control.wait(together, f"the boundary states by {self.name}")
            if common is not None:
                common.wait()
        if side.waiting_name is not None:
            waits = direction.waits(side.segment).sequence
            side.enter(next(state for chain, state in zip(mine, together.values) if chain.sequence == waits
                            and state is not None))
            side.run_waiting()
        return found

    def start(self, crossings, rank, pair, transport, dtype):
        """Begin what all ranks do at once, if there is anything; handed to every `Trip` as `common`. Its `wait` is
        called in the end."""
        return None

    def travel(self, trip):
        """A generator that takes one rank's part in a scan; it returns the state [h,K,V] that enters here, None at the
        first position."""
        raise NotImplementedError

    def scan_sent(self, chain, K, V, direction):
        """Values that each position of a chain sends in its scan, an array."""
        raise NotImplementedError

    def sent(self, crossings):
        """Bytes that each rank sends in one direction, a list."""
        K, V, values = crossings.K, crossings.V, np.zeros(crossings.ranks, np.int64)
        for chain in crossings.chains:
            if len(chain.scanned.heads):
                values[list(chain.ranks)] += self.scan_sent(chain.scanned, K, V, crossings.direction)
        return (values * crossings.width + self.handed_on(crossings)).tolist()

    def handed_on(self, crossings):
        """Bytes that each rank sends to its neighbour for heads that need no scan, an array."""
        sent = np.zeros(crossings.ranks, np.int64)
        for chain in crossings.chains:
            sent[list(chain.ranks[:-1])] += len(chain.handed_on.heads) * crossings.K * crossings.V * crossings.width
        return sent

    def held(self, crossings):
        """Bytes of other ranks' boundary matrices that each rank holds at once in one direction, a list."""
        K, V, values = crossings.K, crossings.V, np.zeros(crossings.ranks, np.int64)
        for chain in crossings.chains:
            values[list(chain.ranks[1:])] += len(chain.handed_on.heads) * K * V
            if len(chain.scanned.heads):
                values[list(chain.ranks)] += self.scan_held(chain.scanned, K, V)
        return (values * crossings.width).tolist()

    def scan_held(self, chain, K, V):
        """The most values of other positions that a position holds at once in a scan."""
        raise NotImplementedError

    def exchange_seconds(self, crossings, rates):
        """Of the slowest chain, its neighbours' messages and its scan one after the other."""
        K, V = crossings.K, crossings.V
        slowest = 0.0
        for chain in crossings.chains:
            seconds, scanned, alone = 0.0, chain.scanned, len(chain.handed_on.heads)
            if alone:
                seconds += rates.latency + alone * K * V * crossings.width / rates.bandwidth
            if len(scanned.heads):
                seconds += self.scan_seconds(scanned, crossings, rates)
            slowest = max(slowest, seconds)
        return slowest

    def scan_seconds(self, chain, crossings, rates):
        """Time of the scan along one chain of heads."""
        K, V, width = crossings.K, crossings.V, crossings.width
        rounds, messages, applied = self.depth(chain)
        most = int(self.scan_sent(chain, K, V, crossings.direction).max())
        return (rounds * rates.latency + messages * rates.gap + most * width / rates.bandwidth
                + applied * 2 * K * K * V / rates.products)

    def depth(self, chain):
        """(messages that follow each other, messages that one rank sends, heads whose pair is applied one after the
        other) of a scan along a chain."""
        raise NotImplementedError

    def _along(self, chain, position, pair, link, direction, before, found, common):
        """One rank's part along one chain, all heads: the state that enters here, or None."""
        feeds, waits = position < chain.feeding, position > 0
        alone, scanned = chain.handed_on, chain.scanned
        sending, arrived = [], None
        if len(alone.heads):
            if feeds:
                sending += link.send("to the neighbour", chain.ranks[position + 1], pair.S[alone.heads])
            if waits:
                arriving, arrived = link.receive("from the neighbour", chain.ranks[position - 1], len(alone.heads))
        state = None
        if len(scanned.heads):
            mine = None
            if feeds:
                M = None if pair.M is None or not scanned.kept[position].any() else pair.M[scanned.heads]
                mine = Affine(M, pair.S[scanned.heads])
            state = yield from self.travel(Trip(scanned, position, mine, link, direction, before, found, common))
        if arrived is not None:
            yield arriving
        yield sending
        if not waits:
            return None
        whole = link.states("entering", len(chain.heads))
        if arrived is not None:
            whole[alone.heads] = arrived().S
        if state is not None:
            whole[scanned.heads] = state
        return whole

    def _with_transition(self, pair, segment, transitions):
        """The gradient's pair of this rank, with the forward's transition turned round."""
        M = transitions["own"]
        return pair if M is None else Affine(np.swapaxes(M, -1, -2), pair.S)
