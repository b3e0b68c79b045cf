"""Ranks that take heads instead of tokens: what one rank sees of the input, and its results by rows for the output.

Heads are independent, so nothing crosses ranks while they compute, and no gradient is summed over them. Every rank
reads all tokens and keeps those of its heads.
"""

from dataclasses import replace

import numpy as np

from kda_engine.arrays import to_host
from kda_engine.errors import InputError

# Tokens that are read at a time, of all heads, before this rank's are kept.
BLOCK_TOKENS = 4096

# Tensors of an input by the heads that their second axis counts.
OF_KEY_HEADS = ("q", "k")


def heads_of_ranks(heads, ranks):
    """The key heads of every rank, ranges of near equal length. Raises InputError where a rank would have none."""
    if heads < ranks:
        raise InputError(f"shard: expected at least one key head for each of the {ranks} ranks, got {heads} heads; "
                         "fewer ranks or --shard tokens")
    bounds = [heads * rank // ranks for rank in range(ranks + 1)]
    return [range(a, b) for a, b in zip(bounds, bounds[1:])]


class HeadsOfInput:
    """An `InputFile` of which only some key heads and their value heads are seen; the same names, fewer heads."""

    def __init__(self, source, heads):
        self._source, group = source, source.HV // source.H
        self._key = slice(heads.start, heads.stop)
        self._value = slice(heads.start * group, heads.stop * group)
        self.H, self.HV = len(heads), len(heads) * group
        for name in ("path", "T", "K", "V", "N", "cu_seqlens", "dtypes", "options", "has"):
            setattr(self, name, getattr(source, name))
        self.conv = source.conv
        if self.conv is not None:
            self.conv = replace(self.conv, weights=self._channels(self.conv.weights),
                                biases=self._channels(self.conv.biases))

    def read(self, name, start, stop):
        """Rows [start, stop) of a tensor by tokens, of these heads."""
        heads = self._of(name)
        blocks = [self._source.read(name, at, min(at + BLOCK_TOKENS, stop))[:, heads]
                  for at in range(start, stop, BLOCK_TOKENS)]
        return np.concatenate(blocks) if blocks else np.ascontiguousarray(self._source.read(name, start, stop)[:, heads])

    def read_whole(self, name):
        """A_log or dt_bias of these heads."""
        return self._source.read_whole(name)[self._value]

    def read_states(self, name, first, last):
        """States of sequences [first, last), of these heads."""
        return np.ascontiguousarray(self._source.read_states(name, first, last)[:, self._value])

    def _of(self, name):
        return self._key if name in OF_KEY_HEADS else self._value

    def _channels(self, arrays):
        size = {"q": self.K, "k": self.K, "v": self.V}
        return {name: x[self._of(name).start * size[name] : self._of(name).stop * size[name]]
                for name, x in arrays.items()}


def by_rows(transport, blocks, spans, widths, what):
    """This rank's rows of a tensor [rows, heads of all ranks, ...]. Collective.

    blocks: all rows of this rank's heads, arrays that follow each other. spans: (first row, row count) of every rank.
    widths: how many heads every rank has.
    """
    mine = [to_host(block) for block in blocks]
    mine = mine[0] if len(mine) == 1 else np.concatenate(mine)
    count, tail = spans[transport.rank][1], mine.shape[2:]
    parts = [np.empty((count, width, *tail), mine.dtype) for width in widths]
    requests = [request for source, part in enumerate(parts) for request in transport.start_receive(part, source)]
    sent = [np.ascontiguousarray(mine[first : first + rows]) for first, rows in spans]
    requests += [request for to, part in enumerate(sent) for request in transport.start_send(part, to)]
    transport.wait(requests, what)
    return np.concatenate(parts, axis=1)


def shares(rows, ranks):
    """(first row, row count) of every rank, near equal."""
    bounds = [rows * rank // ranks for rank in range(ranks + 1)]
    return [(a, b - a) for a, b in zip(bounds, bounds[1:])]
