"""Who owns which tokens: sequences cut over ranks. Arithmetic only; nothing here moves data."""

from dataclasses import dataclass

import numpy as np

from .errors import InputError
from .layout import CHUNK


@dataclass(frozen=True)
class Piece:
    """The part of one sequence that lies on one rank: packed tokens [start, stop).

    from_left: the sequence began on an earlier rank. to_right: it goes on on a later one.
    """

    sequence: int
    start: int
    stop: int
    from_left: bool
    to_right: bool


@dataclass(frozen=True)
class Segment:
    """One rank's share, packed tokens [start, stop): pieces in order. Only the first can come from the left, only
    the last go on to the right. An empty sequence is a piece of no tokens on exactly one rank."""

    rank: int
    start: int
    stop: int
    pieces: tuple

    @property
    def left(self):
        """The piece that waits for a state from the left, or None."""
        return self.pieces[0] if self.pieces and self.pieces[0].from_left else None

    @property
    def right(self):
        """The piece that feeds a later rank, or None. The same as `left` where a sequence passes right through."""
        return self.pieces[-1] if self.pieces and self.pieces[-1].to_right else None

    @property
    def cu_seqlens(self):
        """The pieces' bounds counted from the segment's start, NumPy int64 [pieces + 1]."""
        return np.array([0] + [p.stop - self.start for p in self.pieces], dtype=np.int64)

    @property
    def started(self):
        """Sequences whose first token (or whole emptiness) is here, a range."""
        return self._sequences([p for p in self.pieces if not p.from_left])

    @property
    def ended(self):
        """Sequences whose last token (or whole emptiness) is here, a range."""
        return self._sequences([p for p in self.pieces if not p.to_right])

    @staticmethod
    def _sequences(pieces):
        return range(pieces[0].sequence, pieces[-1].sequence + 1) if pieces else range(0)


def partition(cu_seqlens, ranks, cuts=None, grid=CHUNK):
    """One Segment a rank.

    cu_seqlens: NumPy integers [N+1]. cuts: ranks - 1 packed token positions, non-decreasing, each on the chunk grid
    of the sequence it falls in (multiples of `grid` from its start, or a sequence boundary); None: near equal token
    counts. A chunk costs the same wherever it lies, so equal counts are equal work. Raises InputError for other cuts.
    """
    cu_seqlens = np.asarray(cu_seqlens, dtype=np.int64)
    T = int(cu_seqlens[-1])
    if cuts is None:
        cuts = [_nearest_cut(cu_seqlens, T * r / ranks, grid) for r in range(1, ranks)]
    else:
        cuts = [int(cut) for cut in cuts]
        _check_cuts(cu_seqlens, ranks, cuts, grid)
    bounds = [0, *cuts, T]
    pieces = [[] for _ in range(ranks)]
    for n in range(len(cu_seqlens) - 1):
        start, stop = int(cu_seqlens[n]), int(cu_seqlens[n + 1])
        if start == stop:
            owner = next((r for r in range(ranks) if bounds[r + 1] > start), ranks - 1)
            pieces[owner].append(Piece(n, start, stop, False, False))
            continue
        # Only the ranks whose bounds meet the sequence, found by bisection: there may be many of both.
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        for r in range(first, ranks):
            here, there = max(start, bounds[r]), min(stop, bounds[r + 1])
            if here < there:
                pieces[r].append(Piece(n, here, there, here > start, there < stop))
            if bounds[r + 1] >= stop:
                break
    return [Segment(r, bounds[r], bounds[r + 1], tuple(pieces[r])) for r in range(ranks)]


def chain(segments, sequence):
    """The ranks that hold tokens of a sequence, in order."""
    return [s.rank for s in segments
            if any(p.sequence == sequence and p.stop > p.start for p in (s.pieces[:1] + s.pieces[-1:]))]


def _nearest_cut(cu_seqlens, position, grid):
    n = int(np.searchsorted(cu_seqlens, position, side="right")) - 1
    n = min(n, len(cu_seqlens) - 2)
    if n < 0:
        return 0
    start, stop = int(cu_seqlens[n]), int(cu_seqlens[n + 1])
    below = min(start + int((position - start) // grid) * grid, stop)
    above = min(below + grid, stop)
    return below if position - below <= above - position else above


def _check_cuts(cu_seqlens, ranks, cuts, grid):
    if len(cuts) != ranks - 1:
        raise InputError(f"cuts: expected {ranks - 1} positions for {ranks} ranks, got {len(cuts)}")
    before = 0
    for cut in cuts:
        if not before <= cut <= int(cu_seqlens[-1]):
            raise InputError(f"cuts: expected non-decreasing positions within [0, {cu_seqlens[-1]}], got {cut}")
        before = cut
        n = int(np.searchsorted(cu_seqlens, cut, side="right")) - 1
        if (cut - int(cu_seqlens[n])) % grid:
            raise InputError(f"cuts: expected multiples of {grid} from the start {cu_seqlens[n]} of sequence {n}, "
                             f"got {cut}")
