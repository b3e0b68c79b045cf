"""Every rank scans some heads of all ranks: pairs go to whoever scans them, states come back.

`heads` does so over all ranks of a chain: constant volume a rank. `levels` does so within each node and lets the ranks
that scan the same heads on every node scan over the nodes, so that little of it crosses the network.
"""

import numpy as np

from kda_engine.affine import Affine

from ..boundary import FORWARD, Chain
from . import exscan
from .scanned import Scanned


class Heads(Scanned):
    """Backward only D travels to who scans: transitions stay there from the way forward."""

    name = "heads"

    def travel(self, trip):
        return (yield from _travel(trip, _Groups(trip.chain, self._groups(trip.chain), trip.direction), self.name))

    def scan_sent(self, chain, K, V, direction):
        return _sent(_Groups(chain, self._groups(chain), direction), K, V)

    def scan_held(self, chain, K, V):
        groups = _Groups(chain, self._groups(chain), FORWARD)
        size, part = max(len(group) for group in groups.ranges), -(-len(chain.heads) // groups.slots)
        return size * part * K * (K + V) + len(chain.heads) * K * V

    def depth(self, chain):
        groups = _Groups(chain, self._groups(chain), FORWARD)
        size = max(len(group) for group in groups.ranges)
        across = max(0, len(groups.ranges) - 2).bit_length() + 1 if len(groups.ranges) > 1 else 0
        heads = -(-len(chain.heads) // groups.slots)
        return 2 + across, 2 * (size - 1) + across, (size + 2 * across) * heads

    def _groups(self, chain):
        """Positions that scan together, ranges that follow each other."""
        return [range(len(chain.ranks))]


class Levels(Heads):
    name = "levels"

    def _groups(self, chain):
        starts = [0] + [p for p in range(1, len(chain.ranks)) if chain.nodes[p] != chain.nodes[p - 1]]
        return [range(a, b) for a, b in zip(starts, starts[1:] + [len(chain.ranks)])]


class _Groups:
    """Who of a chain scans what. ranges: positions of each group. slots: into how many parts the heads are cut, as
    many as the smallest group has positions; slices [slots]: the heads of each part.
    """

    def __init__(self, chain, ranges, direction):
        self.chain, self.ranges, self.direction = chain, ranges, direction
        self.slots = min(len(group) for group in ranges)
        heads = len(chain.heads)
        bounds = [heads * i // self.slots for i in range(self.slots + 1)]
        self.slices = [slice(a, b) for a, b in zip(bounds, bounds[1:])]

    def owner(self, group, slot):
        """The position of a group that scans a part; the same rank in both directions."""
        return group[slot] if self.direction is FORWARD else group[-1 - slot]

    def slot(self, group, position):
        """The part that a position scans, or None."""
        place = position - group[0] if self.direction is FORWARD else group[-1] - position
        return place if place < self.slots else None

    def across(self, slot):
        """The groups as a `Chain` of the ranks that scan one part."""
        chain, part = self.chain, self.slices[slot]
        kept = np.array([chain.kept[group[0] : group[-1] + 1, part].all(axis=0) for group in self.ranges])
        kept[[0, -1]] = False
        ranks = tuple(chain.ranks[self.owner(group, slot)] for group in self.ranges)
        return Chain(chain.sequence, ranks, chain.heads[part], kept, ranks)


def _travel(trip, groups, name):
    chain, position, pair, link = trip.chain, trip.position, trip.pair, trip.link
    number, group = next((i, group) for i, group in enumerate(groups.ranges) if position in group)
    mine, ahead = groups.slot(group, position), trip.direction is FORWARD
    sending, arriving, arrived = [], [], {}

    # Every position's pair to who scans it.
    for slot, part in enumerate(groups.slices):
        owner = groups.owner(group, slot)
        if pair is not None and owner != position and part.start < part.stop:
            M = pair.M[part] if ahead and pair.M is not None else None
            sending += link.send(f"{name} to {slot}", chain.ranks[owner], pair.S[part], M, chain.kept[position, part])
    scans = mine is not None and groups.slices[mine].start < groups.slices[mine].stop
    states = {}
    if scans:
        part = groups.slices[mine]
        feeding = [p for p in group if p < chain.feeding]
        for p in feeding:
            if p != position:
                requests, arrived[p] = link.receive(f"{name} from {p - group[0]}", chain.ranks[p],
                                                    part.stop - part.start, chain.kept[p, part] if ahead else None)
                arriving += requests
        yield arriving
        pairs = {p: arrived[p]() if p != position else
                 Affine(None if pair.M is None else pair.M[part], pair.S[part]) for p in feeding}
        if not ahead:
            pairs = {p: Affine(None if trip.before[chain.ranks[p]] is None
                               else trip.direction.of_travel(trip.before[chain.ranks[p]]), x.S)
                     for p, x in pairs.items()}
        elif trip.found is not None:
            # The last position's rank feeds nobody forward, but the first of the way back is known from itself.
            trip.found[chain.sequence] = {chain.ranks[p]: x.M for p, x in pairs.items()} | {
                chain.ranks[p]: None for p in group if p not in pairs}
        state = None
        if len(groups.ranges) > 1:
            total = None if number == len(groups.ranges) - 1 else _composed(list(pairs.values()))
            state = yield from exscan.scan(groups.across(mine), number, total, link, f"{name} over nodes")
        for p in group:
            if state is not None or p > 0:
                states[p] = state
            if p in pairs:
                state = pairs[p].apply(state)

    # The states that enter back to their ranks.
    whole, arriving = None, []
    if position > 0:
        whole = link.states(f"{name} entering", len(chain.heads))
        for slot, part in enumerate(groups.slices):
            owner = groups.owner(group, slot)
            if owner != position and part.start < part.stop:
                arriving += link.transport.start_receive(whole[part], chain.ranks[owner])
    for p, state in states.items():
        if p == position:
            whole[groups.slices[mine]] = state
        else:
            sending += link.send(f"{name} back to {p - group[0]}", chain.ranks[p], state)
    yield arriving + sending
    return whole


def _composed(pairs):
    total = pairs[0]
    for pair in pairs[1:]:
        total = exscan.after(pair, total)
    return total


def _sent(groups, K, V):
    """Values that each position sends, an array."""
    chain, ahead = groups.chain, groups.direction is FORWARD
    heads, sent = len(chain.heads), np.zeros(len(chain.ranks), np.int64)
    moves = chain.kept.sum(axis=1)
    for group in groups.ranges:
        for position in group:
            slot = groups.slot(group, position)
            part = slice(0, 0) if slot is None else groups.slices[slot]
            own = part.stop - part.start
            if position < chain.feeding:
                sent[position] += (heads - own) * K * V
                if ahead:
                    sent[position] += int(moves[position] - chain.kept[position, part].sum()) * K * K
            others = len(group) - (group[0] == 0) - (position > 0)
            sent[position] += own * K * V * others
    if len(groups.ranges) > 1:
        for slot, part in enumerate(groups.slices):
            if part.start < part.stop:
                owners = [groups.owner(group, slot) for group in groups.ranges]
                sent[owners] += exscan.scan_values(groups.across(slot), K, V)
    return sent
