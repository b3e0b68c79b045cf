"""The recurrence over the chunks of pieces, forward and backward (kernels: the fused chain's carrying warps).

    U = N Diag(beta) (V - K+ S),  O = scale (Q+ S + P U),  S <- Diag(e^gamma_C) S + Kr^T U
    dU = scale P^T dO + Kr dS,  X = N^T dU,  dS <- Diag(e^gamma_C) dS + scale Q+^T dO - K+^T Diag(beta) X
"""

import numpy as np

from .constants import constant
from .formats import exponent_of, fma, power_of_two, reciprocal_of_power, to_float16
from .records import TILE_CHUNKS, Records
from .state import State, by_column, by_warp, largest_given

CHUNK = constant("kChunk")


def turned(x):
    return np.swapaxes(x, -1, -2)


class Steps:
    """The order in which the chunks of pieces are worked: step by step, longest piece first."""

    def __init__(self, chunks):
        self.order = np.argsort(-chunks.counts, kind="stable")
        self.counts = chunks.counts[self.order]
        self.first = chunks.first[self.order]
        self.lengths = chunks.lengths[self.order]

    def __len__(self):
        return int(self.counts.max(initial=0))

    def forward(self, step):
        """(chunks, numbers for `State.look`) of the pieces that have so many."""
        running = int((self.counts > step).sum())
        return self.first[:running] + step, self.lengths[:running] // CHUNK - step

    def backward(self, step):
        running = int((self.counts > step).sum())
        last = self.counts[:running] - 1 - step
        return self.first[:running] + last, last


def tile_of(chunks):
    """(tile of each chunk, whether the chunk is the tile's first, and its last); tiles restart with every piece."""
    number = np.arange(int(chunks.counts.sum())) - np.repeat(chunks.first, chunks.counts)
    tiles = -(-chunks.counts // TILE_CHUNKS)
    first = np.repeat(np.cumsum(tiles) - tiles, chunks.counts)
    starts = number % TILE_CHUNKS == 0
    last = number == np.repeat(chunks.counts, chunks.counts) - 1
    return first + number // TILE_CHUNKS, starts, last | ~starts


def run(problem, chunks, operands, values, initial, saves, queries=True):
    """(out [chunks,HV,16,V] before its units, last states [pieces,HV,K,V], Records or None).

    values [chunks,HV,16,V]; initial [pieces,HV,K,V]. saves: as with KDA_SAVES; queries: whether there are outputs.
    """
    steps, scale = Steps(chunks), problem.scale
    state = State(initial[steps.order])
    out = np.empty(values.shape, "f4") if queries else None
    tile, starts, _ = tile_of(chunks)
    records = None
    if saves:
        records = Records.empty(int(tile.max(initial=-1)) + 1, len(chunks.tokens), values.shape[1], *initial.shape[2:],
                                CHUNK)
    for step in range(len(steps)):
        which, number = steps.forward(step)
        now = state.running(len(which))
        now.look(number)
        _forward(now, operands.at(which), values[which], scale, which, out, records, tile, starts)
    final = np.empty(initial.shape, "f4")
    final[steps.order] = state.restored()
    return out, final, records


def _forward(state, chunk, values, scale, which, out, records, tile, starts):
    unit_before = state.unit.copy()
    beta = chunk.beta[..., None]
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = state.round_and_decay(chunk.decay)
        of_keys, of_queries = chunk.key_in @ rounded, chunk.query_in @ rounded
        written = beta * values
        largest = by_warp(written)
        factor = state.keep_range(largest, np.float32(constant("kGrowth")))
        if factor is not None:
            of_keys, of_queries = of_keys * by_column(factor), of_queries * by_column(factor)
        # U of its own unit, where what a small beta writes would fade in the state's.
        raised = np.ones_like(state.unit) if records is None else _raise(state, largest, chunk.beta)
        unit = raised * state.unit
        residual = to_float16(fma(written, by_column(unit), -by_column(raised) * beta * of_keys))
        update = chunk.solve @ residual
        kept = to_float16(update)
        update = to_float16(by_column(reciprocal_of_power(raised)) * update)
        state.value += turned(chunk.key_out) @ update
        if out is not None:
            restore = by_column(scale * reciprocal_of_power(state.unit))
            out[which] = restore * (of_queries + chunk.attend @ update)
    if records is not None:
        first = starts[which]
        records.states[tile[which[first]]] = rounded[first]
        records.state_units[tile[which[first]]] = unit_before[first]
        records.tokens[which], records.token_units[which] = kept, unit


def _raise(state, largest, beta):
    """By which power of two U, as kept, is larger than in the state's unit."""
    strongest = np.fmax.reduce(beta, axis=-1)[..., None]
    exponent = exponent_of(fma(largest, state.unit, strongest * state.bound))
    more = np.minimum(np.minimum(7 - exponent, 126), 120 - exponent_of(state.unit))
    return power_of_two(np.where(exponent < constant("kSmallestKept"), more, 0))


def run_back(problem, chunks, operands, d_out, d_final, saves):
    """(gradients of the first states [pieces,HV,K,V], Records or None) from d_out [chunks,HV,16,V]."""
    steps, scale = Steps(chunks), problem.scale
    state = State(d_final[steps.order])
    tile, _, ends = tile_of(chunks)
    records = None
    if saves:
        records = Records.empty(int(tile.max(initial=-1)) + 1, len(chunks.tokens), d_out.shape[1], *d_final.shape[2:],
                                CHUNK)
    for step in range(len(steps)):
        which, number = steps.backward(step)
        now = state.running(len(which))
        now.look(number)
        _back(now, operands.at(which), d_out[which], scale, which, records, tile, ends)
    first = np.empty(d_final.shape, "f4")
    first[steps.order] = state.restored()
    return first, records


def _back(state, chunk, d_out, scale, which, records, tile, ends):
    with np.errstate(over="ignore", invalid="ignore"):
        largest = largest_given(d_out)
        state.keep_range(np.abs(scale) * largest, np.float32(constant("kGrowth")))
        source = to_float16(by_column(scale * state.unit) * d_out)
        rounded = state.round_and_decay(chunk.decay)
        d_update = to_float16(turned(chunk.attend) @ source + chunk.key_out @ rounded)
        solved = turned(chunk.solve) @ d_update
        state.value += turned(chunk.query_in) @ source
        state.value += turned(chunk.key_in) @ to_float16(-chunk.beta[..., None] * solved)
    if records is not None:
        last = ends[which]
        records.states[tile[which[last]]] = rounded[last]
        records.state_units[tile[which[last]]] = state.unit[last]
        records.tokens[which], records.token_units[which] = to_float16(solved), state.unit
        records.largest[which] = largest
