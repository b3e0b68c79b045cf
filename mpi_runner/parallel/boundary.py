"""What crosses ranks in one direction: who waits for whom, and which heads need more than their neighbour's state.

Forward states travel from left to right, S_out = M S_in + S; backward their gradients from right to left,
dS_in = M^T dS_out + D. With D for S and M^T for M both are the same, so routes know one direction: that of travel.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kda_engine.partition import chain


@dataclass(frozen=True)
class Direction:
    """name: also the phase of the work in this direction. sign: +1 where states travel to higher ranks."""

    name: str
    sign: int

    def waits(self, segment):
        """The piece of a rank that a state travels to, or None."""
        return segment.left if self.sign > 0 else segment.right

    def feeds(self, segment):
        """The piece of a rank that a state leaves, or None."""
        return segment.right if self.sign > 0 else segment.left

    def chain(self, segments, sequence):
        """The ranks that hold tokens of a sequence, in the order of travel."""
        return chain(segments, sequence)[:: self.sign]

    def of_travel(self, M):
        """A transition M [...,K,K] as it acts in this direction (a view)."""
        return M if self.sign > 0 else np.swapaxes(M, -1, -2)


FORWARD, BACKWARD = Direction("forward", 1), Direction("backward", -1)


def passes(segment):
    """Whether one piece is all that a rank holds of tokens, and comes from the left and goes on to the right."""
    return segment.left is not None and segment.right is segment.left


@dataclass(frozen=True)
class Crossings:
    """Everything that crosses ranks in one direction; the same on every rank.

    segments: of all ranks. HV, K, V; width: bytes of one value of a state. kept [R,HV] bool: heads whose transition
    matters, which only pieces that pass right through a rank can have. nodes: of every rank, a name of the machine that it runs on;
    None where all are on one.
    """

    direction: Direction
    segments: list
    HV: int
    K: int
    V: int
    width: int
    kept: np.ndarray
    nodes: tuple | None = None

    @classmethod
    def exact(cls, direction, segments, HV, K, V, width, nodes=None):
        """Those of a run that drops no transition."""
        kept = np.zeros((len(segments), HV), bool)
        kept[[passes(segment) for segment in segments]] = True
        return cls(direction, segments, HV, K, V, width, kept, nodes)

    @property
    def ranks(self):
        return len(self.segments)

    @property
    def sends(self):
        """Which ranks a state leaves, [R] bool."""
        return np.array([self.direction.feeds(segment) is not None for segment in self.segments])

    @property
    def state_bytes(self):
        """Of S [HV,K,V]."""
        return self.HV * self.K * self.V * self.width

    def before(self, rank):
        """The ranks in front of `rank` along the sequence that it waits for, in the order of travel; none if it
        waits for nobody."""
        piece = self.direction.waits(self.segments[rank])
        if piece is None:
            return []
        ranks = self.direction.chain(self.segments, piece.sequence)
        return ranks[: ranks.index(rank)]

    def behind(self, rank):
        """The ranks behind `rank` along the sequence that it feeds, in the order of travel."""
        piece = self.direction.feeds(self.segments[rank])
        if piece is None:
            return []
        ranks = self.direction.chain(self.segments, piece.sequence)
        return ranks[ranks.index(rank) + 1 :]

    @cached_property
    def chains(self):
        """Every sequence that crosses ranks, a `Chain` of all heads each."""
        ranks = {}
        for segment in self.segments:
            for piece in dict.fromkeys(segment.pieces[:1] + segment.pieces[-1:]):
                if piece.from_left or piece.to_right:
                    ranks.setdefault(piece.sequence, []).append(segment.rank)
        return [self._chain(sequence, held[:: self.direction.sign]) for sequence, held in ranks.items()]

    def _chain(self, sequence, ranks):
        kept = self.kept[ranks]
        kept[[0, -1]] = False
        nodes = tuple(0 if self.nodes is None else self.nodes[rank] for rank in ranks)
        return Chain(sequence, tuple(ranks), np.arange(self.HV), kept, nodes)


@dataclass(frozen=True)
class Chain:
    """Some heads of one sequence along the ranks that hold it, in the order of travel.

    A state leaves every position but the last. heads [h]: numbers of the heads. kept [positions,h] bool: where a
    transition matters; never at the first position, whose state is known, nor at the last, which feeds nobody. nodes: of
    each position.
    """

    sequence: int
    ranks: tuple
    heads: np.ndarray
    kept: np.ndarray
    nodes: tuple

    @property
    def feeding(self):
        """How many positions a state leaves."""
        return len(self.ranks) - 1

    def of_heads(self, which):
        """The same for some of its heads, a slice or bool [h]."""
        return Chain(self.sequence, self.ranks, self.heads[which], self.kept[:, which], self.nodes)

    @property
    def scanned(self):
        """The part that needs more than its neighbour's state: heads with a transition that matters somewhere."""
        return self.of_heads(self.kept.any(axis=0))

    @property
    def handed_on(self):
        """The part whose states are all known from their own rank's tokens."""
        return self.of_heads(~self.kept.any(axis=0))
