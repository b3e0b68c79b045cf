"""What crosses ranks in one direction: who waits for whom, and which heads need more than their neighbour's state.

Forward states travel from left to right, S_out = M S_in + S; backward their gradients from right to left,
dS_in = M^T dS_out + D. With D for S and M^T for M both are the same, so routes know one direction: that of travel.
"""

from dataclasses import dataclass

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
    matters, which only pieces that pass right through a rank can have.
    """

    direction: Direction
    segments: list
    HV: int
    K: int
    V: int
    width: int
    kept: np.ndarray

    @classmethod
    def exact(cls, direction, segments, HV, K, V, width):
        """Those of a run that drops no transition."""
        kept = np.zeros((len(segments), HV), bool)
        kept[[passes(segment) for segment in segments]] = True
        return cls(direction, segments, HV, K, V, width, kept)

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
