"""Pairs of tokens by levels (kernel: `TokenLevel`): every second block of `size` tokens meets the block before it."""

import numpy as np


def meets(size, tokens):
    """Which pairs [row, column] a level has; size 0: each token with itself."""
    row, column = np.indices((tokens, tokens))
    if size == 0:
        return row == column
    return is_row(size, row) & ~is_row(size, column) & ((row ^ column) < 2 * size)


def is_row(size, token):
    """Whether the token is in the second of its two blocks."""
    return (token & size) != 0


def ranges(size, tokens):
    """1 where the decay of token m lies between token t and its blocks' meeting place, [t, m]."""
    t, m = np.indices((tokens, tokens))
    middle = t if size == 0 else (t & ~(2 * size - 1)) + size - 1
    return np.where(t > middle, (m > middle) & (m <= t), (m > t) & (m <= middle)).astype("f4")
