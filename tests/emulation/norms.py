"""Norms of keys and queries as the preparation takes them: logarithms, which meet decays in one exponent."""

import numpy as np

from .constants import constant
from .formats import ex2, lg2, to_element


def log2_norms(x):
    """log2 of the reciprocal norms [...,1] of the rows of x."""
    with np.errstate(over="ignore", invalid="ignore"):
        square = np.einsum("...d,...d->...", x, x)[..., None]
        return np.float32(-0.5) * lg2(square + np.float32(constant("kNormEpsilon")))


def shrink_rows(x, norms, dtype):
    """(rows, norms) of chunks [...,16,K]: in a chunk with a large row, all that are above 1 are brought near 1."""
    large = (norms < np.float32(constant("kSmallestLogNorm"))).any(axis=-2, keepdims=True)
    if not large.any():
        return x, norms
    with np.errstate(invalid="ignore", over="ignore"):
        shift = np.where(large, np.fmin(np.ceil(norms), np.float32(0)), np.float32(0))
        return np.where(large, to_element(ex2(shift) * x, dtype), x), norms - shift
