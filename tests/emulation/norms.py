"""Norms of keys and queries as the preparation takes them: logarithms, which meet decays in one exponent."""

import numpy as np

from .constants import constant
from .formats import ex2, lg2, to_element


def log2_norms(x):
    """log2 of the reciprocal norms [...,1] of the rows of x; where squares overflow, by rows that are shrunk first."""
    square, large, shrunk = _squares(x)
    usual = lg2(square + np.float32(constant("kNormEpsilon")))
    return np.where(large, np.float32(constant("kShrinkExponent")) - np.float32(0.5) * lg2(shrunk),
                    np.float32(-0.5) * usual)


def reciprocal_norms(x):
    """The reciprocal norms [...,1] of the rows of x as the gradients take them."""
    square, large, shrunk = _squares(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        usual = np.float32(1) / np.sqrt(square + np.float32(constant("kNormEpsilon")))
        return np.where(large, _shrink() / np.sqrt(shrunk), usual)


def _shrink():
    return np.float32(2.0 ** constant("kShrinkExponent"))


def _squares(x):
    with np.errstate(over="ignore", invalid="ignore"):
        square = np.einsum("...d,...d->...", x, x)[..., None]
        small = _shrink() * x
        return square, np.isinf(square), np.einsum("...d,...d->...", small, small)[..., None]


def shrink_rows(x, norms, dtype):
    """(rows, norms) of chunks [...,16,K]: in a chunk with a large row, all that are above 1 are brought near 1."""
    large = (norms < np.float32(constant("kSmallestLogNorm"))).any(axis=-2, keepdims=True)
    if not large.any():
        return x, norms
    with np.errstate(invalid="ignore", over="ignore"):
        least = np.float32(constant("kSmallestShift"))
        shift = np.where(large, np.fmin(np.fmax(np.ceil(norms), least), np.float32(0)), np.float32(0))
        return np.where(large, to_element(ex2(shift) * x, dtype), x), norms - shift
