"""The checksum of HDF5's filter fletcher32, in NumPy: for chunks that are read and written beside the HDF5 library.

The checksum holds two sums over the data's 16-bit words w_0 ... w_(n-1), high byte first, modulo 65535:

    sum w_i   and   sum (n - i) w_i,   the second in the upper 16 bits
"""

import numpy as np

_MODULUS = 65535

# Words that are added to the running sums at once. Sums and words together stay in the L2 cache.
_ROW = 1 << 15
# So many rows of largest words are summed twice without leaving 32 bits.
_ROWS = 256

# Bytes that the checksum takes behind a chunk's data.
CHECKSUM_BYTES = 4


def fletcher32(data):
    """The checksum of contiguous bytes (anything with the buffer protocol) as HDF5 2.0 stores it, an integer."""
    data = np.frombuffer(data, np.uint8)
    if len(data) % 2:
        data = np.append(data, np.uint8(0))
    words = data.view("<u2")
    total, weighted = 0, 0
    for start in range(0, len(words), _ROWS * _ROW):
        block = words[start : start + _ROWS * _ROW]
        of_block, weighted_of_block = _sums(block)
        weighted = (weighted + len(block) * total + weighted_of_block) % _MODULUS
        total = (total + of_block) % _MODULUS
    # The low byte came first in each word: 256 times a word is the word with its bytes exchanged, modulo 65535.
    total, weighted = 256 * total % _MODULUS, 256 * weighted % _MODULUS
    # HDF5 folds its sums, so that only data of nothing but zeros have a sum of 0.
    if not (total and weighted) and words.any():
        total, weighted = total or _MODULUS, weighted or _MODULUS
    return weighted << 16 | total


def _sums(words):
    """sum w_i and sum (n - i) w_i of at most _ROWS * _ROW words."""
    rows = words[: len(words) // _ROW * _ROW].reshape(-1, _ROW)
    once, twice = np.zeros(_ROW, np.uint32), np.zeros(_ROW, np.uint32)
    for row in rows:
        np.add(once, row, out=once)
        np.add(twice, once, out=twice)
    tail = words[rows.size :].astype(np.int64)
    once, twice = once.astype(np.int64), twice.astype(np.int64)
    of_rows = int(once.sum())
    weighted = _ROW * int(twice.sum()) - int((np.arange(_ROW) * once).sum())
    weighted += len(tail) * of_rows + int((np.arange(len(tail), 0, -1) * tail).sum())
    return of_rows + int(tail.sum()), weighted
