"""The few chunks that the probes of the fused chain work on again and again, raw, as they lie in a loaded slot."""

import numpy as np

from .. import api, cases
from ..device.kernels.fused import CHAIN_SIZE
from ..layout import CHUNK

# Slots of the chain's ring, and channels of a tile, of which a slot has 8: (name, first channel) as they lie.
SLOTS = 12
TILE = 64
ORDER = (("k", 0), ("q", 0), ("k", TILE), ("q", TILE), ("g", 0), ("g", TILE), ("v", 0), ("v", TILE))


def draw_chunks():
    """A case of SLOTS chunks of one head, in bfloat16, gates in the strong regime."""
    return cases.make("strong", dtype="bfloat16", tokens=SLOTS * CHUNK, heads=1, K=CHAIN_SIZE, V=CHAIN_SIZE)


def raw_slots(case):
    """uint16 [SLOTS, 16-bit words of a slot's raw tiles] of the case's chunks (kernels_cu/tile/fused/ring.cuh)."""
    words = {name: getattr(case, name).view("u2").reshape(SLOTS, CHUNK, CHAIN_SIZE) for name in "qkgv"}
    return np.concatenate([_swizzled(words[name][..., start : start + TILE]) for name, start in ORDER], axis=1)


def _swizzled(tile):
    """[slots, 16, 64] as flat tiles: the piece p of 8 words of row r lies at piece p ^ (r % 8)."""
    pieces = tile.reshape(SLOTS, CHUNK, 8, 8)
    row, piece = np.indices((CHUNK, 8))
    return pieces[:, row, piece ^ row % 8].reshape(SLOTS, -1)


def expected(case, chunks, ring):
    """(last chunk's outputs, final state) by the float64 recurrence of `chunks` chunks, the first `ring` in turn."""
    tokens = (np.arange(chunks)[:, None] % ring * CHUNK + np.arange(CHUNK)).reshape(-1)
    q, k, v, g, beta = (getattr(case, name)[tokens] for name in ("q", "k", "v", "g", "beta"))
    result = api.forward(q, k, v, g, beta, A_log=case.A_log, dt_bias=case.dt_bias, options=case.options,
                         engine="reference")
    return result.out[-CHUNK:, 0], result.final_state[0, 0]
