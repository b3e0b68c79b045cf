"""Two result files, tensor by tensor."""

import numpy as np

from ..compare import Comparison, block_starts
from .schema import STATE_RESULTS, TOKEN_RESULTS

SLAB_BYTES = 64 << 20


def names_to_match(a, b):
    """(in both, only in a, only in b): the results of two `ResultFile`s.

    Boundary matrices are left out: they depend on how a run was cut.
    """
    in_a, in_b = ([name for name in file.tensors() if not name.startswith("boundary/")] for file in (a, b))
    return ([name for name in in_a if name in in_b], [name for name in in_a if name not in in_b],
            [name for name in in_b if name not in in_a])


def compare_tensor(a, b, name, cu_seqlens=None):
    """The `compare.Comparison` of one tensor, of one shape in both `ResultFile`s, read slab by slab.

    cu_seqlens [N+1]: the sequences that blocks of tokens are counted from; None takes all tokens for one.
    """
    shape = a.shape(name)
    comparison = Comparison()
    starts = _starts(name, shape, cu_seqlens)
    for first, last in _slabs(shape, starts):
        at = slice(*np.searchsorted(starts, (first, last)))
        comparison.add(a.read_rows(name, first, last), b.read_rows(name, first, last), first,
                       starts[at] - first if len(starts) else None)
    return comparison


def place(name, worst_at, cu_seqlens=None):
    """Where a tensor's worst block lies, for people: "sequence 2, head 0, tokens from 64"; "" when there is none."""
    if worst_at is None:
        return ""
    row, head = worst_at
    if name in STATE_RESULTS:
        return f"sequence {row}, head {head}"
    sequence = 0 if cu_seqlens is None else int(np.searchsorted(cu_seqlens, row, side="right")) - 1
    start = 0 if cu_seqlens is None else int(cu_seqlens[sequence])
    return f"sequence {sequence}, head {head}, tokens from {row - start}"


def _starts(name, shape, cu_seqlens):
    if name in STATE_RESULTS:
        return np.arange(shape[0])
    if name in TOKEN_RESULTS:
        return block_starts([0, shape[0]] if cu_seqlens is None else cu_seqlens)
    return np.arange(0)


def _slabs(shape, starts):
    """(first, last) row pairs of about SLAB_BYTES in float64, cut at block starts where there are blocks."""
    rows = max(1, SLAB_BYTES // (8 * max(1, int(np.prod(shape[1:])))))
    places = starts if len(starts) else np.arange(0, shape[0], rows)
    first = 0
    while first < shape[0]:
        later = places[places >= first + rows]
        last = int(later[0]) if len(later) else shape[0]
        yield first, last
        first = last
