"""What `probe_products` must have added up: its operands by the same formula, the products in float64."""

import numpy as np

STEPS = 4


def scattered(x):
    """A number in [-1, 1) for every 32-bit x."""
    x = np.asarray(x, "u4")
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return (x ^ (x >> 16)).view("i4").astype("f4") * np.float32(2.0**-31)


def expected_sums(width, warpgroups, rounds):
    """float64 [warpgroup]: the sum over all accumulators after all phases, which take the STEPS operands in turn."""
    threads = 128 * warpgroups
    words = scattered(np.arange(64 * width)).astype("f2").astype("f8")
    if width == 128:
        # Two tiles of 64 columns of 16 rows a step; only the rows' sums count, and a swizzle stays within its row.
        b = words.reshape(STEPS, 2, 16, 64).sum(axis=(1, 3))
    else:
        rows = words.reshape(width, 8, 8)
        row, piece = np.indices((width, 8))
        b = rows[row, piece ^ row % 8].sum(axis=0).reshape(STEPS, 16)
    # Register j of a lane has channels 2 (lane % 4) and + 1, from 8 on for the upper two.
    index = np.arange(STEPS * 4 * threads * 2) + 32 * width
    a = scattered(index).astype("f2").astype("f8").reshape(STEPS, 2, 2, warpgroups, 32, 4, 2)
    a = a.sum(axis=(2, 4)).transpose(2, 0, 1, 3, 4).reshape(warpgroups, STEPS, 16)
    products = 2 * (8 + 40) // STEPS * rounds
    return products * np.einsum("gsk,sk->g", a, b)
