"""An exclusive scan in log2(R) rounds: in round i a rank hands what it has composed to the rank 2^i further on."""

import numpy as np

from kda_engine.affine import Affine

from .scanned import Scanned


class Exscan(Scanned):
    """Behind the rounds each position holds what all positions up to it make of a state, and hands the state on to its
    neighbour. A position that has composed the chain's start in knows its state, and sends no transition any more.
    """

    name = "exscan"

    def travel(self, trip):
        return (yield from scan(trip.chain, trip.position, trip.pair, trip.link, self.name))

    def scan_sent(self, chain, K, V, direction):
        return scan_values(chain, K, V)

    def scan_held(self, chain, K, V):
        return len(chain.heads) * K * (K + V)

    def depth(self, chain):
        rounds = max(0, chain.feeding - 1).bit_length()
        return rounds + 1, rounds + 1, 2 * rounds * len(chain.heads)


def scan(chain, position, pair, link, name):
    """The generator of one position: yields requests, returns the state that enters, None at the first position."""
    ranks, heads, feeding = chain.ranks, len(chain.heads), chain.feeding
    sending = []
    for distance, covered in _rounds(chain):
        # One buffer to send from and one to receive into serve all rounds, so memory does not grow with them.
        yield sending
        if position + distance < feeding:
            sending = link.send(f"{name} to", ranks[position + distance], pair.S, pair.M, covered[position])
        if distance <= position < feeding:
            arriving, arrived = link.receive(f"{name} from", ranks[position - distance], heads,
                                             covered[position - distance])
            yield arriving
            pair = after(pair, arrived())
    yield sending
    sending, state = [], None
    if position < feeding:
        sending = link.send(f"{name} to", ranks[position + 1], pair.S)
    if position > 0:
        arriving, arrived = link.receive(f"{name} from", ranks[position - 1], heads)
        yield arriving
        state = arrived().S
    yield sending
    return state


def scan_values(chain, K, V):
    """Values that each position sends, an array."""
    feeding, heads = chain.feeding, len(chain.heads)
    sent = np.zeros(len(chain.ranks), np.int64)
    for distance, covered in _rounds(chain):
        sends = np.arange(len(sent)) + distance < feeding
        sent += sends * (heads * K * V + covered.sum(axis=1) * K * K)
    sent[:feeding] += heads * K * V
    return sent


def _rounds(chain):
    """(distance, covered) of every round. covered [positions,h]: heads of which a position then still holds a
    transition: over the last `distance` positions up to it all are kept."""
    distance, covered = 1, chain.kept
    while distance < chain.feeding:
        yield distance, covered
        before = np.zeros_like(covered)
        before[distance:] = covered[:-distance]
        distance, covered = 2 * distance, covered & before


def after(pair, first):
    """The map that applies `first`, then `pair`."""
    if pair.M is None:
        return pair
    return Affine(None if first.M is None else pair.M @ first.M, pair.M @ first.S + pair.S)
