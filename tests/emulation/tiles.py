"""Tiles of 32 tokens and a value head, as the gradients' kernel takes them, from the records of the two chains."""

from dataclasses import dataclass

import numpy as np

from .constants import constant
from .formats import exponent_of, power_of_two, reciprocal_of_power, to_float16
from .records import TILE_CHUNKS
from .state import by_column

CHUNK = constant("kChunk")
TILE = TILE_CHUNKS * CHUNK


@dataclass(frozen=True)
class Tile:
    """Of m tiles and heads: q, k, g, d_out [m,HV,32,128] raw; beta [m,HV,32], 0 where there is no token; state and
    d_state [m,HV,K,V], writes (U) and values (X) [m,HV,32,V] as recorded; their reciprocal units by column,
    [m,HV,1,V], those of writes, values and d_out [m,HV,32,V] by token.
    """

    q: np.ndarray
    k: np.ndarray
    g: np.ndarray
    d_out: np.ndarray
    raw_beta: np.ndarray
    beta: np.ndarray
    state: np.ndarray
    d_state: np.ndarray
    writes: np.ndarray
    values: np.ndarray
    of_state: np.ndarray
    of_d_state: np.ndarray
    of_writes: np.ndarray
    of_values: np.ndarray
    of_out: np.ndarray


class TileTokens:
    """Which chunks and tokens each tile has; the same fields as `ChunkTokens` for what gathers."""

    def __init__(self, chunks, tile):
        count = int(tile.max(initial=-1)) + 1
        # The chunk's number in its tile follows from its place among those of the tile.
        self.chunk = np.full((count, TILE_CHUNKS), -1)
        seen = np.zeros(count, int)
        for number, of in enumerate(tile):
            self.chunk[of, seen[of]] = number
            seen[of] += 1
        self.tokens = np.where((self.chunk >= 0)[..., None], chunks.tokens[self.chunk], 0).reshape(count, TILE)
        self.valid = ((self.chunk >= 0)[..., None] & chunks.valid[self.chunk]).reshape(count, TILE)

    def gather(self, x, missing=0.0):
        """x [T,heads,...] as float32 [tiles,heads,32,...], missing tokens as said."""
        rows = x.astype("f4")[self.tokens]
        rows[~self.valid] = missing
        return np.ascontiguousarray(np.moveaxis(rows, 1, 2))

    def records(self, x, missing):
        """x [chunks,HV,rows,V] as [tiles,HV,2 rows,V], a missing chunk's as said."""
        both = np.where((self.chunk >= 0)[..., None, None, None], x[self.chunk].astype("f4"), np.float32(missing))
        return np.concatenate([both[:, 0], both[:, 1]], axis=2)

    def units(self, x):
        """Reciprocal units [chunks,HV,V/16] by token and column, [tiles,HV,32,V]."""
        return np.repeat(self.records(by_column(reciprocal_of_power(x)), 1), CHUNK, axis=2)


def tiles_of(problem, tokens, d_out, beta, forward, backward):
    """The `Tile` of all tiles and heads from the `Records` of both chains; beta [T,HV] activated."""
    # dO's unit is one for a chunk and head, and brings its largest value near 2^7.
    largest = np.fmax.reduce(backward.largest, axis=-1, initial=np.float32(0))[..., None]
    unit = np.repeat(power_of_two(np.clip(7 - exponent_of(largest), -100, 100)), forward.token_units.shape[-1], axis=-1)
    of_out = tokens.units(unit)
    column = lambda x: by_column(reciprocal_of_power(x))
    with np.errstate(over="ignore", invalid="ignore"):
        return Tile(
            q=tokens.gather(problem.q), k=tokens.gather(problem.k),
            g=tokens.gather(problem.g, problem.gates.missing),
            d_out=to_float16(reciprocal_of_power(of_out) * tokens.gather(d_out)),
            raw_beta=tokens.gather(problem.beta), beta=tokens.gather(beta),
            state=forward.states.astype("f4"), d_state=backward.states.astype("f4"),
            writes=tokens.records(forward.tokens, 0), values=tokens.records(backward.tokens, 0),
            of_state=column(forward.state_units), of_d_state=column(backward.state_units),
            of_writes=tokens.units(forward.token_units), of_values=tokens.units(backward.token_units), of_out=of_out)
