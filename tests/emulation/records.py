"""What the chains leave for the gradients (kernel: `Record`): float16 values, and their units."""

from dataclasses import dataclass

import numpy as np

from .state import WARP_COLUMNS

TILE_CHUNKS = 2


@dataclass(frozen=True)
class Records:
    """states [tiles,HV,K,V], tokens [chunks,HV,16,V] in float16; state_units [tiles,HV,V/16], token_units
    [chunks,HV,V/16]. largest [chunks,HV,V/16]: of |dO| (backward).
    """

    states: np.ndarray
    tokens: np.ndarray
    state_units: np.ndarray
    token_units: np.ndarray
    largest: np.ndarray

    @classmethod
    def empty(cls, tiles, chunks, heads, K, V, rows):
        units = lambda count: np.ones((count, heads, V // WARP_COLUMNS), "f4")
        return cls(np.zeros((tiles, heads, K, V), "f2"), np.zeros((chunks, heads, rows, V), "f2"), units(tiles),
                   units(chunks), np.zeros((chunks, heads, V // WARP_COLUMNS), "f4"))
