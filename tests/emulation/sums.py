"""Sums over the tokens of a tile within blocks of a size (kernel: token_sums.cuh), [...,tokens,channels]."""

import numpy as np


def sum_from_token(x, size):
    """x_t <- sum of x_i over the block's i >= t."""
    blocks = _blocks(x, size)
    return np.cumsum(blocks[..., ::-1, :], axis=-2, dtype="f4")[..., ::-1, :].reshape(x.shape)


def sum_before_token(x, size):
    """x_t <- sum of x_i over the block's i < t."""
    blocks = _blocks(x, size)
    sums = np.zeros_like(blocks)
    sums[..., 1:, :] = np.cumsum(blocks[..., :-1, :], axis=-2, dtype="f4")
    return sums.reshape(x.shape)


def _blocks(x, size):
    return x.reshape(x.shape[:-2] + (x.shape[-2] // size, size, x.shape[-1]))
