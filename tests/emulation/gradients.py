"""All gradients of the tokens of tiles of 32 (kernel: the fused gradients, and its two ways through the pairs)."""

from dataclasses import dataclass

import numpy as np

from .chain import turned
from .constants import constant
from .formats import ex2, fma, rcp, rounded_tf32, to_element
from .gates import beta_adjoint
from .levels import is_row, meets, ranges
from .norms import reciprocal_norms
from .state import WARP_COLUMNS
from .sums import sum_before_token, sum_from_token
from .tiles import CHUNK, TILE

# Channels of a warp, which decides for all of them how pairs are taken.
WARP_CHANNELS = 16


@dataclass(frozen=True)
class TokenGradients:
    """By value head: q, k [tiles,HV,32,K] float32, v, g, beta rounded to the inputs' type; bias [tiles,HV,K] and rate
    [tiles,HV]: the tiles' shares of ddt_bias and dA_log.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    bias: np.ndarray
    rate: np.ndarray


@dataclass
class Shares:
    """What a way through the pairs makes: gradients of the normed query and key, of the log decays [m,32,K]."""

    query: np.ndarray
    key: np.ndarray
    decay: np.ndarray


def gradients(problem, tile):
    """The `TokenGradients` of a `Tile`."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return _gradients(problem, tile)


def _gradients(problem, tile):
    gates, dtype, scale = problem.gates, problem.dtype, problem.scale
    key_norm, query_norm = reciprocal_norms(tile.k), reciprocal_norms(tile.q)
    key, query = tile.k * key_norm, tile.q * query_norm
    beta = tile.beta[..., None]
    total, d_query, d_key, d_key_out = state_products(tile)
    pairs = [column_sums(tile.d_out, tile.of_out, tile.writes, tile.of_writes),
             column_sums(tile.values, tile.of_values, tile.writes, tile.of_writes)]
    own = [np.diagonal(x, axis1=-2, axis2=-1)[..., None] for x in pairs]
    dP = rounded_tf32(np.tril(pairs[0], -1))
    dG = rounded_tf32(np.tril(-beta * pairs[1], -1))
    units = gates.units(tile.g)

    way = ByFactors.of(units, gates.unit)
    d = way.take(key, scale * query, dP, dG, d_query, beta * d_key, d_key_out, total, own[0])
    if not gates.bounded:
        strong = strong_tokens(units)
        deep = goes_by_levels(strong, way, gates)
        strong &= ~deep[..., None, :]
        of_states = lambda tiles: SpannedStates.of(units[tiles], gates.unit, key[tiles], scale * query[tiles],
                                                   d_query[tiles], (beta * d_key)[tiles], d_key_out[tiles], total[tiles])
        tiles = strong.any(axis=(-1, -2))
        if tiles.any():
            decay = of_strong_tokens(of_states(tiles), dP[tiles], dG[tiles], strong[tiles].any(axis=-1))
            d.decay[tiles] = np.where(by_channel(strong[tiles]), decay, d.decay[tiles])
        tiles = deep.any(axis=-1)
        if tiles.any():
            part = by_levels(of_states(tiles), dP[tiles], dG[tiles], own[0][tiles])
            for name in ("query", "key", "decay"):
                x = getattr(d, name)
                x[tiles] = np.where(by_channel(deep[tiles][..., None, :]), getattr(part, name), x[tiles])

    raw, rate = gates.adjoint(d.decay, tile.g)
    bias = np.zeros(raw.shape[:2] + raw.shape[3:], "f4") if gates.form == "log" else raw.sum(axis=2, dtype="f4")
    return TokenGradients(
        q=through_norm(d.query, query, query_norm * scale), k=through_norm(d.key, key, key_norm),
        v=to_element(beta * tile.of_values * tile.values, dtype), g=to_element(raw, dtype),
        beta=to_element(beta_adjoint(own[1][..., 0], tile.raw_beta), dtype),
        bias=bias, rate=rate.sum(axis=(2, 3), dtype="f4"))


def through_norm(d, x, factor):
    return factor * (d - x * (x * d).sum(axis=-1, keepdims=True, dtype="f4"))


def by_block(x):
    """[...,rows,V] as [...,V/16,rows,16]: what a unit spans."""
    return np.moveaxis(x.reshape(x.shape[:-1] + (x.shape[-1] // WARP_COLUMNS, WARP_COLUMNS)), -2, -3)


def column_sums(a, of_a, b, of_b):
    """sum over the value columns of a_iv b_jv, both with their units [...,rows,V]."""
    # Units are powers of two and the same for all tokens of a chunk: products first, block by block.
    part = by_block(a) @ turned(by_block(b))
    factor = by_block(of_a)[..., :1] * turned(by_block(of_b)[..., :1])
    return (factor * part).sum(axis=-3, dtype="f4")


def state_products(tile):
    """(d total [m,HV,1,K], d(Q+) without the scale, d(K+) without beta, d(Kr)), [m,HV,32,K]."""
    rows = np.broadcast_to
    of_state, of_d_state = (rows(x, tile.state.shape) for x in (tile.of_state, tile.of_d_state))
    total = by_block(tile.state) * by_block(tile.d_state)
    factor = by_block(of_state) * by_block(of_d_state)
    total = (factor[..., :1] * total.sum(axis=-1, keepdims=True, dtype="f4")).sum(axis=-3, dtype="f4")
    return (turned(total), column_sums(tile.d_out, tile.of_out, tile.state, of_state),
            -column_sums(tile.values, tile.of_values, tile.state, of_state),
            column_sums(tile.writes, tile.of_writes, tile.d_state, of_d_state))


def by_warp(x):
    """The largest of every warp's channels, [...,K/16]."""
    return np.fmax.reduce(x.reshape(x.shape[:-1] + (x.shape[-1] // WARP_CHANNELS, WARP_CHANNELS)), axis=-1)


def by_channel(x):
    """[...,K/16] as [...,K]."""
    return np.repeat(x, WARP_CHANNELS, axis=-1)


def strong_tokens(units):
    """Which tokens decay too strongly for shared factors in one of a warp's channels, [m,HV,32,K/16]."""
    return by_warp(units) > np.float32(constant("kMostOfSharedToken", False))


def goes_by_levels(strong, way, gates):
    """Which warps' channels [m,HV,K/16] have too many such tokens, or chunks that decay too strongly."""
    deepest = -by_warp(-np.fmin(way.half[0], way.half[1])[..., 0, :])
    many = strong.sum(axis=-2) > constant("kMost", False)
    return many | (2 * deepest < gates.unit * np.float32(constant("kMostOfSharedChunk", False)))


@dataclass(frozen=True)
class ByFactors:
    """Pairs by factors around the middles of the two chunks. fall [m,HV,32,K]: e^(gamma - m); half: of both chunks half
    the log2 decay, [m,HV,1,K].
    """

    fall: np.ndarray
    half: tuple

    @classmethod
    def of(cls, units, unit):
        halves, falls = [], []
        for chunk in (slice(0, CHUNK), slice(CHUNK, TILE)):
            running = np.cumsum(units[..., chunk, :], axis=-2, dtype="f4")
            halves.append(np.float32(0.5) * unit * running[..., -1:, :])
            falls.append(ex2(fma(unit, running, -halves[-1])))
        return cls(np.concatenate(falls, axis=-2), tuple(halves))

    def take(self, key, query, dP, dG, d_query, d_key, d_key_out, total, own):
        """The `Shares`; query with the scale; own: dP of each token with itself."""
        fall, rise = self.fall, rcp(self.fall)
        early, late = ex2(self.half[0]), ex2(self.half[1])
        across = early * late
        key_back = rounded_tf32(key * rise)
        d_query = _add_rows(d_query * early, dP, key_back, across)
        d_key = _add_rows(d_key * early, dG, key_back, across)
        d_key_out = d_key_out * np.concatenate([np.broadcast_to(x, key[..., :CHUNK, :].shape)
                                                for x in (across * late, late)], axis=-2)
        # All that is written to the state behind the tile.
        more = (key_back * d_key_out).sum(axis=-2, keepdims=True, dtype="f4") + across * across * total

        key_in, query_in = rounded_tf32(key * fall), rounded_tf32(query * fall)
        of_decay = fma(query_in, d_query, key_in * d_key)
        d_query = fma(fall, d_query, own * key)
        d_key = fma(own, query, d_key * fall)
        columns = d_key_out + _columns(dP, query_in, across) + _columns(dG, key_in, across)
        of_decay = fma(-key_back, columns, of_decay)
        return Shares(d_query, fma(rise, columns, d_key), sum_from_token(of_decay, TILE) + more)


def _add_rows(d, matrix, x, across):
    """d_i + sum_j x_j m_ij; what stands in d for the second chunk still lacks `across`, as its pairs with the first."""
    first, second = slice(0, CHUNK), slice(CHUNK, TILE)
    d[..., second, :] = (d[..., second, :] + matrix[..., second, first] @ x[..., first, :]) * across
    for chunk in (first, second):
        d[..., chunk, :] += matrix[..., chunk, chunk] @ x[..., chunk, :]
    return d


def _columns(matrix, x, across):
    """sum_i x_i m_ij."""
    first, second = slice(0, CHUNK), slice(CHUNK, TILE)
    sums = [turned(matrix[..., chunk, chunk]) @ x[..., chunk, :] for chunk in (first, second)]
    sums[0] = fma(across, turned(matrix[..., second, first]) @ x[..., second, :], sums[0])
    return np.concatenate(sums, axis=-2)


@dataclass(frozen=True)
class SpannedStates:
    """What the states give: gradients of query and key, of the log decays sums over what spans a token and nothing else.

    units, unit, key, query (with the scale): of the tiles.
    """

    units: np.ndarray
    unit: np.float32
    key: np.ndarray
    query: np.ndarray
    d_query: np.ndarray
    d_key: np.ndarray
    of_decay: np.ndarray

    @classmethod
    def of(cls, units, unit, key, query, d_query, d_key, d_key_out, total):
        early, late = chunks_of(units)
        whole = [unit * x.sum(axis=-2, keepdims=True, dtype="f4") for x in (early, late)]
        none = np.zeros_like(whole[0])
        before = np.tril(np.ones((CHUNK, CHUNK), "f4"))
        d = decays(units, unit, (before, before), (none, whole[0]))
        d_query, d_key = d_query * d, d_key * d
        of_decay = sum_from_token(fma(query, d_query, key * d_key), TILE)
        behind = np.triu(np.ones((CHUNK, CHUNK), "f4"), 1)
        part = decays(units, unit, (behind, behind), (whole[1], none)) * d_key_out
        of_decay += sum_before_token(part * key, TILE) + ex2(whole[0] + whole[1]) * total
        return cls(units, unit, key, query, d_query, d_key + part, of_decay)


def chunks_of(x):
    return x[..., :CHUNK, :], x[..., CHUNK:, :]


def decays(units, unit, which, more):
    """Decays [m,HV,32,K] over the tokens `which` ([token, m] of either chunk) and `more` log2 beside it."""
    return np.concatenate([ex2(fma(unit, among @ x, beside))
                           for among, x, beside in zip(which, chunks_of(units), more)], axis=-2)


def of_strong_tokens(states, dP, dG, tokens):
    """Gradients of the log decays where tokens [m,HV,32] holds; of other tokens what the states give."""
    of_decay, at, m = states.of_decay.copy(), np.arange(TILE)[:, None], np.arange(TILE)
    for token in np.flatnonzero(tokens.any(axis=tuple(range(tokens.ndim - 1)))):
        between = np.where(at >= token, (m >= token) & (m <= at), (m > at) & (m < token)).astype("f4")
        among = [between[:CHUNK, :CHUNK], between[CHUNK:, CHUNK:]]
        chunk = token // CHUNK
        beyond = (m >= token if chunk == 0 else m < token)[CHUNK * chunk :][:CHUNK].astype("f4")
        more = [np.float32(0), np.float32(0)]
        more[1 - chunk] = states.unit * (beyond @ chunks_of(states.units)[chunk])[..., None, :]
        d = decays(states.units, states.unit, among, more)
        columns = np.where(at < token, rounded_tf32(states.key * d), np.float32(0))
        rows = d * fma(states.query, dP @ columns, states.key * (dG @ columns))
        of_decay[..., token, :] += rows[..., token:, :].sum(axis=-2, dtype="f4")
    return of_decay


def by_levels(states, dP, dG, own):
    """The same `Shares` where no factor spans the decays: every factor is a decay, nothing cancels."""
    units, unit, key, query = states.units, states.unit, states.key, states.query
    d_query, d_key, of_decay = states.d_query, states.d_key, states.of_decay
    token = np.arange(TILE)
    size = CHUNK
    while size > 0:
        within = ranges(size, TILE)
        d = decays(units, unit, (within[:CHUNK, :CHUNK], within[CHUNK:, CHUNK:]), (np.float32(0), np.float32(0)))
        k, q = rounded_tf32(key * d), rounded_tf32(query * d)
        met = meets(size, TILE)
        of_pairs, of_keys = np.where(met, dP, np.float32(0)), np.where(met, dG, np.float32(0))
        of_query, of_row = of_pairs @ k, of_keys @ k
        of_column = turned(of_pairs) @ q + turned(of_keys) @ k
        d_query = fma(d, of_query, d_query)
        d_key = fma(d, of_column, fma(d, of_row, d_key))
        rows = sum_from_token(fma(q, of_query, k * of_row), size)
        of_decay = of_decay + np.where(is_row(size, token)[:, None], rows, sum_before_token(k * of_column, size))
        size //= 2
    return Shares(fma(own, key, d_query), fma(own, query, d_key), of_decay)
