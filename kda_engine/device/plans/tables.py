"""Where the chunks of a variable-length problem lie, and how its sequences are cut."""

from dataclasses import dataclass

import numpy as np

from ...layout import CHUNK


@dataclass(frozen=True)
class Tables:
    """cu_seqlens, chunk_offsets [N + 1] int64 on the device; chunks: their number."""

    cu_seqlens: object
    chunk_offsets: object
    chunks: int


def make_tables(device, cu_seqlens):
    """The Tables for cu_seqlens (bytes of int64 [N+1]) on a Device, for its `ready`."""
    cu_seqlens = np.frombuffer(cu_seqlens, dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(-(-np.diff(cu_seqlens) // CHUNK))])
    return Tables(device.upload(cu_seqlens), device.upload(offsets), int(offsets[-1]))


def cut_spans(counts, length):
    """Sequences of so many chunks cut into spans of at most `length`, as even as can be: (chunks [2,S], sequences [S]).

    A sequence without chunks is one span without chunks.
    """
    pieces = np.maximum(-(-counts // length), 1)
    sequences = np.repeat(np.arange(len(counts)), pieces)
    number = np.arange(len(sequences)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = np.concatenate([[0], np.cumsum(counts)])[:-1]
    bound = lambda i: offsets[sequences] + counts[sequences] * i // pieces[sequences]
    return np.stack([bound(number), bound(number + 1)]), sequences
