"""Which tokens each chunk holds, and in which order chunks are worked: by step, a group's sequences side by side."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Slab:
    """Consecutive steps of a table, worked in one go.

    tokens [chunks, C]: the token of each place; places past a sequence's end repeat its last token.
    valid [chunks, C]: False there; None when every place holds a token.
    steps: the chunks of each step as slices; a step's chunks belong to the first sequences of the table.
    chunks: the slab's place among all chunks of the table, a slice.
    """

    tokens: np.ndarray
    valid: np.ndarray | None
    steps: list
    chunks: slice


class ChunkTable:
    """Chunks of length C of some sequences, the grid restarting at each sequence's start.

    sequences: their indices, longest first, so that those still running at any step come first. chunks: how many.
    """

    def __init__(self, sequences, cu_seqlens, C):
        self.C = C
        self.sequences = sequences
        self._starts = cu_seqlens[sequences]
        self._lengths = cu_seqlens[sequences + 1] - self._starts
        counts = -(-self._lengths // C)
        # How many sequences still have a chunk at each step.
        running = len(counts) - np.searchsorted(counts[::-1], np.arange(counts[0]), side="right")
        self._first = np.concatenate([[0], np.cumsum(running)]).astype(np.int64)
        self.chunks = int(self._first[-1])

    @classmethod
    def split(cls, cu_seqlens, C, most):
        """Tables of at most `most` sequences of similar length that cover every non-empty sequence."""
        lengths = np.diff(cu_seqlens)
        order = np.argsort(-lengths, kind="stable")
        order = order[: np.count_nonzero(lengths)]
        return [cls(order[i : i + most], cu_seqlens, C) for i in range(0, len(order), most)]

    def slabs(self, chunks_per_slab):
        """All steps in order as slabs of about so many chunks, at least one step each."""
        slabs, step = [], 0
        while step < len(self._first) - 1:
            last = int(np.searchsorted(self._first, self._first[step] + chunks_per_slab, side="right")) - 1
            slabs.append((step, max(last, step + 1)))
            step = slabs[-1][1]
        return slabs

    def slab(self, first_step, last_step):
        """The slab of the steps [first_step, last_step)."""
        first = self._first[first_step : last_step + 1]
        tokens = np.empty((int(first[-1] - first[0]), self.C), dtype=np.int64)
        valid = np.empty(tokens.shape, dtype=bool)
        steps = []
        for step in range(first_step, last_step):
            place = slice(int(self._first[step] - first[0]), int(self._first[step + 1] - first[0]))
            running = place.stop - place.start
            within = step * self.C + np.arange(self.C)
            ends = self._lengths[:running, None]
            np.less(within, ends, out=valid[place])
            np.add(self._starts[:running, None], np.minimum(within, ends - 1), out=tokens[place])
            steps.append(place)
        return Slab(tokens, None if valid.all() else valid, steps, slice(int(first[0]), int(first[-1])))
