"""Boundary matrices between ranks: which travel, how they are packed, and what each rank makes of them.

A rank contributes for at most one piece: forward the one that goes on to the right, backward the one that came from
the left. It sends S (or D) always, and M only for the heads whose transition matters and only where the piece both
comes from the left and goes on to the right: elsewhere the incoming state is known where the piece is computed.
"""

import numpy as np

from kda_engine.affine import Affine
from kda_engine.partition import chain


class Boundaries:
    """The plan of one direction's exchange, the same on every rank.

    kept [R,HV] bool: heads whose M travels. sends [R] bool: ranks that contribute.
    """

    def __init__(self, segments, shape, dtype, sends, kept):
        self.segments, self.dtype = segments, dtype
        self.HV, self.K, self.V = shape
        self.sends, self.kept = sends, kept
        self.lengths = [
            (self.HV * self.K * self.V if sends[r] else 0) + int(kept[r].sum()) * self.K * self.K
            for r in range(len(segments))
        ]

    def pack(self, rank, pair):
        """One rank's contribution as a 1-D array."""
        if not self.sends[rank]:
            return np.empty(0, self.dtype)
        parts = [pair.S.ravel()]
        if self.kept[rank].any():
            parts.append(pair.M[self.kept[rank]].ravel())
        return np.concatenate(parts)

    def unpack(self, rank, flat):
        """The rank's pair from its contribution; heads without M get a zero one, None if no head has any."""
        size = self.HV * self.K * self.V
        S = flat[:size].reshape(self.HV, self.K, self.V)
        if not self.kept[rank].any():
            return Affine(None, S)
        M = np.zeros((self.HV, self.K, self.K), self.dtype)
        M[self.kept[rank]] = flat[size:].reshape(-1, self.K, self.K)
        return Affine(M, S)

    def before(self, rank, sequence, contributions):
        """The pairs of the ranks in front of `rank` along a sequence, first to last."""
        return [self.unpack(r, contributions[r]) for r in chain(self.segments, sequence) if r < rank]

    def transition(self, rank, contributions):
        """A rank's M alone; None where it sent none (the last rank of a sequence sends nothing at all)."""
        return self.unpack(rank, contributions[rank]).M if self.kept[rank].any() else None
