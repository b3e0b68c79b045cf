"""How a variable-length problem is laid out for the portable kernels: the spans that chains work through."""

from dataclasses import dataclass

import numpy as np

from ...layout import CHUNK
from ..kernels.portable import WIDE_COLUMNS
from ..kernels.table import tiles
from .tables import cut_spans, make_tables

# Time of one link of the scan over spans, and of one chunk of a summary, in chunks of the forward.
SCAN_LINK = 6.0
SUMMARY_CHUNK = 0.7


@dataclass(frozen=True)
class Spans:
    """Runs of chunks, each within one sequence, in order; device arrays.

    chunks [2, count] int64: first chunk of each span, then the chunk behind its last. sequences [count] int32.
    """

    count: int
    chunks: object
    sequences: object


@dataclass(frozen=True)
class Plan:
    """Tables of one problem, on the device.

    cu_seqlens, chunk_offsets, chunks: as in Tables. whole: one span a sequence. parts: the sequences
    cut further, None when that would not pay; parts_but_last: all of those but each sequence's last;
    sequence_parts [N + 1] int64: first part of each sequence; sequence_bounds [N + 1]: the same where every sequence
    has one more, so that a scan also reaches the state behind its last part.
    """

    sequences: int
    chunks: int
    longest: int
    cu_seqlens: object
    chunk_offsets: object
    whole: Spans
    parts: Spans | None
    parts_but_last: Spans | None
    sequence_parts: object
    sequence_bounds: object


def make_plan(device, cu_seqlens, value_heads, K, V):
    """The Plan for cu_seqlens (bytes of int64 [N+1]) on a Device, for its `ready`."""
    tables = device.ready(make_tables, cu_seqlens)
    cu_seqlens = np.frombuffer(cu_seqlens, dtype=np.int64)
    lengths = np.diff(cu_seqlens)
    counts = -(-lengths // CHUNK)
    chunk_offsets = np.concatenate([[0], np.cumsum(counts)])
    length = span_length(counts, value_heads, K, V, device.target.multiprocessors)
    parts = None if length is None else cut_spans(counts, length)
    if parts is not None:
        last = np.diff(parts[1], append=len(counts)) != 0
        first_part = np.searchsorted(parts[1], np.arange(len(counts) + 1))
    return Plan(
        sequences=len(counts),
        chunks=tables.chunks,
        longest=int(lengths.max(initial=0)),
        cu_seqlens=tables.cu_seqlens,
        chunk_offsets=tables.chunk_offsets,
        whole=_upload(device, np.stack([chunk_offsets[:-1], chunk_offsets[1:]]), np.arange(len(counts))),
        parts=None if parts is None else _upload(device, *parts),
        parts_but_last=None if parts is None else _upload(device, parts[0][:, ~last], parts[1][~last]),
        sequence_parts=None if parts is None else device.upload(first_part),
        sequence_bounds=None if parts is None else device.upload(first_part + np.arange(len(counts) + 1)),
    )


def _upload(device, chunks, sequences):
    return Spans(len(sequences), device.upload(np.ascontiguousarray(chunks)), device.upload(sequences.astype(np.int32)))


def span_length(counts, value_heads, K, V, multiprocessors):
    """Chunks per span that a problem is best cut into, or None when it is best left whole.

    The model counts waves of blocks: whole, every chain is as long as its sequence; cut, the spans are summarised
    side by side ([S | M], all but the last of a sequence), scanned in order, and worked through side by side.
    """
    longest = int(counts.max(initial=0))
    of_output, of_map = tiles(V, WIDE_COLUMNS), tiles(V, WIDE_COLUMNS) + tiles(K, WIDE_COLUMNS)

    def time(length):
        pieces = np.maximum(-(-counts // length), 1)
        spans, links = int(pieces.sum()), int(pieces.max(initial=1)) - 1
        forward = max(1.0, spans * value_heads * of_output / multiprocessors) * length
        summary = max(1.0, (spans - len(counts)) * value_heads * of_map / multiprocessors) * length * SUMMARY_CHUNK
        return forward + (summary + links * SCAN_LINK if links else 0.0)

    candidates = {-(-longest // n) for n in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if longest >= 8 * n}
    best = min(candidates, key=time, default=None)
    return best if best is not None and time(best) < 0.9 * time(longest) else None
