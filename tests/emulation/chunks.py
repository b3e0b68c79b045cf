"""Chunks of 16 tokens: which tokens they hold, and their operands as the preparing warps leave them in a slot."""

from dataclasses import dataclass

import numpy as np

from .constants import constant
from .formats import ex2, fma, to_float16
from .gates import activate_beta
from .norms import log2_norms, shrink_rows
from .triangles import by_levels, by_shared_factor, unit_lower_inverse

CHUNK = constant("kChunk")


class ChunkTokens:
    """The chunks of runs of tokens, run after run; every run's grid starts with it.

    tokens [chunks,16]: of each place; valid [chunks,16]: whether there is one. first [runs]: each run's first chunk;
    counts [runs]: chunks of each.
    """

    def __init__(self, starts, lengths):
        starts, lengths = np.asarray(starts, "i8"), np.asarray(lengths, "i8")
        self.lengths = lengths
        self.counts = -(-lengths // CHUNK)
        self.first = np.cumsum(self.counts) - self.counts
        run = np.repeat(np.arange(len(starts)), self.counts)
        within = CHUNK * (np.arange(len(run)) - self.first[run])[:, None] + np.arange(CHUNK)
        self.valid = within < lengths[run][:, None]
        self.tokens = starts[run][:, None] + np.where(self.valid, within, 0)

    def gather(self, x, missing=0.0):
        """x [T,heads,...] as float32 [chunks,heads,16,...], missing tokens as said."""
        rows = x.astype("f4")[self.tokens]
        rows[~self.valid] = missing
        return np.ascontiguousarray(np.moveaxis(rows, 1, 2))


@dataclass(frozen=True)
class Operands:
    """Of chunks and value heads: key_in (K+), query_in (Q+), key_out (Kr) [...,16,K], solve (N), attend (P) [...,16,16]
    in float16; decay (e^gamma_C) [...,K], beta [...,16] in float32.
    """

    key_in: np.ndarray
    query_in: np.ndarray
    key_out: np.ndarray
    solve: np.ndarray
    attend: np.ndarray
    decay: np.ndarray
    beta: np.ndarray

    def at(self, which):
        return Operands(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


def prepare(problem, chunks):
    """The `Operands` of a `Problem`'s chunks."""
    gates, dtype = problem.gates, problem.dtype
    units = gates.units(chunks.gather(problem.g, gates.missing))
    keys, queries = chunks.gather(problem.k), chunks.gather(problem.q)
    keys, key_norm = shrink_rows(keys, log2_norms(keys), dtype)
    queries, query_norm = shrink_rows(queries, log2_norms(queries), dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = ex2(query_norm - key_norm)
        made = _decayed(gates, units, keys, queries, key_norm, ratio)
        key_in, query_in, key_out, decay, G, P = made
        valid = chunks.valid[:, None]
        beta = np.where(valid, activate_beta(chunks.gather(problem.beta), problem.options.beta), np.float32(0))
        restored = np.float32(constant("kRestored"))
        return Operands(
            key_in=to_float16(key_in), query_in=to_float16(query_in), key_out=to_float16(key_out),
            solve=to_float16(unit_lower_inverse(beta[..., None] * G)), attend=to_float16(np.tril(restored * P)),
            decay=decay, beta=beta)


def _decayed(gates, units, keys, queries, key_norm, ratio):
    """(K+, Q+, Kr before rounding, e^gamma_C, G, P)."""
    unit = gates.unit
    running = np.cumsum(units, axis=-2, dtype="f4")
    total = running[..., -1:, :]
    decay = ex2(unit * total)
    fall, grow = ex2(fma(unit, running, key_norm)), ex2(fma(-unit, running, key_norm))
    key, back, query = keys * fall, keys * grow, queries * (fall * ratio)
    made = [key, query, decay * back, decay[..., 0, :], *by_shared_factor(key, back, query)]
    if gates.bounded:
        return made
    # One channel decides for all of the chunk.
    most = np.fmax.reduce(total, axis=(-1, -2))
    far, levels = (most > np.float32(constant(name, False)) for name in ("kMostFromStart", "kMostFromMiddle"))
    for which, way in ((far & ~levels, _from_middle), (levels, _level_by_level)):
        if which.any():
            found = way(unit, *(x[which] for x in (units, running, decay, keys, queries, key_norm, ratio)))
            for x, part in zip(made, found):
                x[which] = part
    return made


def _from_middle(unit, units, running, decay, keys, queries, key_norm, ratio):
    """By factors around half of the chunk's decay."""
    middle = np.float32(0.5) * unit * running[..., -1:, :]
    rest = ex2(middle)
    fall, grow = ex2(fma(unit, running, key_norm - middle)), ex2(fma(-unit, running, key_norm + middle))
    key, back, query = keys * fall, keys * grow, queries * (fall * ratio)
    return rest * key, rest * query, rest * back, decay[..., 0, :], *by_shared_factor(key, back, query)


def _level_by_level(unit, units, running, decay, keys, queries, key_norm, ratio):
    """By decays, and what is behind a token summed from behind, so that nothing has to cancel."""
    later = np.zeros_like(units)
    later[..., :-1, :] = np.cumsum(units[..., :0:-1, :], axis=-2, dtype="f4")[..., ::-1, :]
    fall = ex2(fma(unit, running, key_norm))
    return (keys * fall, queries * (fall * ratio), keys * ex2(fma(unit, later, key_norm)), decay[..., 0, :],
            *by_levels(keys, queries, units, unit, key_norm, ratio))
