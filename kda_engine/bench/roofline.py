"""The least work of the operator in closed form: bytes that must move, products that the chunk algorithm needs.

Bytes: every input read once, every output written once. FLOPs: two per multiply-add of the products over channels or
tokens, with each triangular factor taken as the triangle that it is; elementwise work, and what an implementation
computes twice or beside the triangle, does not count. Formulas: docs/operator.md, sections 4 and 6.
"""

import numpy as np


def forward_bytes(inputs):
    """Bytes of one forward. inputs: by name, as `kda_engine.forward` takes them; out is like v, states are alike."""
    written = inputs["v"].nbytes + inputs["initial_state"].nbytes
    return sum(x.nbytes for x in inputs.values()) + written


def backward_bytes(inputs):
    """Bytes of one backward: all inputs and the gradients of out and final state in, a gradient of each input out."""
    read = inputs["v"].nbytes + inputs["initial_state"].nbytes
    return 2 * sum(x.nbytes for x in inputs.values()) + read


def forward_flops(lengths, heads, K, V, C):
    """FLOPs of one forward in chunks of C tokens. lengths: tokens of each sequence; heads: value heads.

    G and P, the inverse N, then per chunk K_in S, N (beta R), Q_in S, P U and K_out^T U.
    """
    return _sum_over_chunks(
        lengths, heads, C, lambda c: 3 * c * K * V + c * c * (K + V) + c * (c - 1) * (c - 2) // 6)


def backward_flops(lengths, heads, K, V, C):
    """FLOPs of one backward, the forward's own products (G, P, N, U, states) not counted again.

    P^T dO, N^T dU; dO U^T, X U^T; K_out dS', Q_in^T dO, K_in^T dR, dO S^T, dR S^T, U dS'^T; the pairs of dq and dk.
    """
    return _sum_over_chunks(lengths, heads, C, lambda c: 6 * c * K * V + 2 * c * c * (K + V))


def _sum_over_chunks(lengths, heads, C, multiply_adds):
    lengths = np.asarray(lengths)
    tails = lengths % C
    whole = int((lengths // C).sum()) * multiply_adds(C)
    return 2 * heads * (whole + sum(multiply_adds(int(c)) for c in tails if c))
