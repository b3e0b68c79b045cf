"""The two triangles of chunks in TF32, by a shared factor or level by level (kernel: `Triangles`).

    G_ij = sum_c k_i k_j e^(gamma_i - gamma_j) for j < i,  P_ij likewise with q_i, and for j = i
"""

import numpy as np

from .constants import constant
from .formats import ex2, fma, rounded_tf32, truncated_tf32
from .levels import meets, ranges

CHUNK = constant("kChunk")


def by_shared_factor(key_in, key_back, query_in):
    """(G, P) of chunks, from k e^(gamma - m), k e^(m - gamma) and q e^(gamma - m), all [...,16,K].

    Nothing is masked.
    """
    columns = np.swapaxes(rounded_tf32(key_back), -1, -2)
    with np.errstate(invalid="ignore", over="ignore"):
        return rounded_tf32(key_in) @ columns, truncated_tf32(query_in) @ columns


def by_levels(keys, queries, units, unit, key_norm, query_ratio):
    """(G, P) of chunks from raw keys and queries and the gates' units; every factor is a decay."""
    G = np.zeros(keys.shape[:-1] + (CHUNK,), "f4")
    P = np.zeros_like(G)
    with np.errstate(invalid="ignore", over="ignore"):
        for size in (8, 4, 2, 1, 0):
            fall = ex2(fma(unit, ranges(size, CHUNK) @ units, key_norm))
            key, query = keys * fall, queries * (fall * query_ratio)
            of_keys, of_queries = by_shared_factor(key, key, query)
            met = meets(size, CHUNK)
            G[..., met] += of_keys[..., met]
            P[..., met] += of_queries[..., met]
    return G, P


def unit_lower_inverse(lower):
    """(I + lower)^-1 of [...,16,16] by forward substitution in float32; nothing on or above the diagonal counts."""
    inverse = np.broadcast_to(np.eye(CHUNK, dtype="f4"), lower.shape).copy()
    with np.errstate(invalid="ignore", over="ignore"):
        for row in range(CHUNK - 1):
            inverse[..., row + 1 :, :] -= lower[..., row + 1 :, row, None] * inverse[..., row, None, :]
    return inverse
