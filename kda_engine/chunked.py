"""The chunked algorithm and its adjoint, for chunks of a power-of-two length C; any array module.

Arrays are [..., C, K] or [..., C, V]; leading axes (chunks, heads) are batch axes. Formulas: docs/operator.md.

Decay between two tokens of a chunk is never formed as a difference of cumulative sums. The chunk is halved again
and again; for rows i of a second half and columns j of its first half, the exponent from j to i is
prefix_i (from the second half's start up to i) + suffix_j (after j to the first half's end). Both are sums of log
decays of one sign, at most 0, so nothing cancels, nothing overflows, and -inf is as good as any other value. The
adjoint runs the same halving backwards, so each log decay receives exactly the pairs that span it.

A token that is not finite, or overflows, spoils what the token recurrence would spoil and nothing else. Products with a
triangular matrix need care for that, since 0 * NaN is NaN: `_product`.
"""

from dataclasses import dataclass, replace

from .arrays import array_module


@dataclass(frozen=True)
class Level:
    """One halving: half size h, row decays e^prefix and column decays e^suffix [..., C/2h, h, K]."""

    rows: object
    columns: object


@dataclass(frozen=True)
class Chunk:
    """Everything about chunks that does not depend on the state.

    q, k: as given, q scaled, [..., C, K]. K_in = k e^gamma and Q_in = q e^gamma read the incoming state; K_out =
    k e^(gamma_C - gamma) writes the outgoing one; total = e^gamma_C [..., K]. into, out_of: the decays e^gamma and
    e^(gamma_C - gamma). G, P [..., C, C] as in the operator's definition; N = (I + Diag(beta) G)^-1.
    q, Q_in and P are None when no output is wanted.
    """

    q: object
    k: object
    beta: object
    into: object
    out_of: object
    K_in: object
    Q_in: object
    K_out: object
    total: object
    G: object
    P: object
    N: object
    levels: list

    def at(self, place):
        """The chunks [place] of the first axis, as the walk over the state needs them (no pairs, no levels)."""
        cut = lambda x: None if x is None else x[place]
        return replace(self, into=None, out_of=None, q=None, k=None, G=None, levels=None, beta=self.beta[place],
                       K_in=self.K_in[place], Q_in=cut(self.Q_in), K_out=self.K_out[place], total=self.total[place],
                       P=cut(self.P), N=self.N[place])


def prepare(q, k, log_decay, beta):
    """The state-independent part of chunks: a `Chunk`. q (scaled) may be None; log_decay [..., C, K]; beta [..., C]."""
    module = array_module(k)
    lead, (C, K) = k.shape[:-2], k.shape[-2:]
    rows = 1 if q is None else 2
    prefix, suffix = log_decay.copy(), module.zeros_like(log_decay)
    # Diagonal blocks of G, P and N at the current half size, [..., blocks, h, h].
    N = module.ones(lead + (C, 1, 1), k.dtype)
    G = module.zeros_like(N)
    P = None if q is None else module.einsum("...cd,...cd->...c", q, k)[..., None, None]
    levels = []
    h = 1
    while h < C:
        halves = lambda x: x.reshape(lead + (C // (2 * h), 2, h) + x.shape[-1:])
        prefix_halves, suffix_halves = halves(prefix), halves(suffix)
        level = Level(module.exp(prefix_halves[..., 1, :, :]), module.exp(suffix_halves[..., 0, :, :]))
        columns = halves(k)[..., 0, :, :] * level.columns
        stacked = module.empty(lead + (C // (2 * h), rows, h, K), k.dtype)
        module.multiply(halves(k)[..., 1, :, :], level.rows, out=stacked[..., 0, :, :])
        if q is not None:
            module.multiply(halves(q)[..., 1, :, :], level.rows, out=stacked[..., 1, :, :])
        pairs = _pair(stacked.reshape(lead + (C // (2 * h), rows * h, K)), columns)
        lower_G = pairs[..., :h, :]
        lower_L = halves(beta[..., None])[..., 1, :, :] * lower_G
        first, second = N[..., 0::2, :, :], N[..., 1::2, :, :]
        N = _join(N, -_product(second, _product(lower_L, first, right="lower"), left="lower"))
        G = _join(G, lower_G)
        if q is not None:
            P = _join(P, pairs[..., h:, :])
        levels.append(level)
        # Grow the sums by additions only: a second half starts behind its first, a first ends before its second.
        second_total = prefix_halves[..., 1, -1:, :].copy()
        prefix_halves[..., 1, :, :] += prefix_halves[..., 0, -1:, :]
        suffix_halves[..., 0, :, :] += second_total
        h *= 2
    into, out_of = module.exp(prefix), module.exp(suffix)
    square = lambda x: None if x is None else x.reshape(lead + (C, C))
    return Chunk(
        q=q, k=k, beta=beta, into=into, out_of=out_of,
        K_in=k * into, Q_in=None if q is None else q * into, K_out=k * out_of, total=into[..., -1, :],
        G=square(G), P=square(P), N=square(N), levels=levels,
    )


def _pair(rows, columns):
    """rows columns^T over K; a plain sum of products where the blocks are single rows."""
    module = array_module(rows)
    if columns.shape[-2] == 1:
        return module.einsum("...rd,...cd->...rc", rows, columns)
    return rows @ module.swapaxes(columns, -1, -2)


def _join(blocks, lower):
    """Diagonal blocks [..., 2b, h, h] and the blocks below them [..., b, h, h] to blocks [..., b, 2h, 2h]."""
    h = blocks.shape[-1]
    joined = array_module(blocks).zeros(lower.shape[:-2] + (2 * h, 2 * h), blocks.dtype)
    joined[..., :h, :h] = blocks[..., 0::2, :, :]
    joined[..., h:, h:] = blocks[..., 1::2, :, :]
    joined[..., h:, :h] = lower
    return joined


def _split(square, h):
    """The inverse of `_join`: [..., b, 2h, 2h] to (diagonal blocks [..., 2b, h, h], lower blocks [..., b, h, h])."""
    module = array_module(square)
    diagonal = module.stack([square[..., :h, :h], square[..., h:, h:]], axis=-3)
    return diagonal.reshape(square.shape[:-3] + (-1, h, h)), square[..., h:, :h]


def write(chunk, state, v):
    """U [..., C, V], what each token adds along its key: N Diag(beta) (v - K_in state)."""
    return _product(chunk.N, chunk.beta[..., None] * (v - chunk.K_in @ state), left="lower")


def next_state(chunk, state, U):
    """The outgoing state [..., K, V]."""
    return chunk.total[..., None] * state + _transposed(chunk.K_out) @ U


def read(chunk, state, U):
    """The outputs [..., C, V]."""
    return chunk.Q_in @ state + _product(chunk.P, U, left="lower")


def read_adjoint(chunk, d_out):
    """(local_dU [..., C, V] = P^T d_out, local_d_state [..., K, V] = Q_in^T d_out)."""
    return _product(_transposed(chunk.P), d_out, left="upper"), _transposed(chunk.Q_in) @ d_out


def write_adjoint(chunk, d_state_out, local_dU):
    """X [..., C, V] = N^T dU with dU = local_dU + K_out d_state_out; local_dU as in `read_adjoint`."""
    return _product(_transposed(chunk.N), local_dU + chunk.K_out @ d_state_out, left="upper")


def previous_d_state(chunk, d_state_out, local_d_state, X):
    """Gradient of the incoming state; local_d_state as in `read_adjoint`."""
    written = _transposed(chunk.K_in) @ (chunk.beta[..., None] * X)
    return chunk.total[..., None] * d_state_out + local_d_state - written


@dataclass(frozen=True)
class ChunkGradients:
    """Gradients of the activated inputs of chunks: dq (of the scaled q), dk, d_log_decay [..., C, K]; dv; dbeta."""

    q: object
    k: object
    v: object
    log_decay: object
    beta: object


def gradients(chunk, state, v, d_out, d_state_out, X):
    """All token gradients of chunks from the incoming state, the outgoing state's gradient and X.

    state, d_state_out [..., K, V]; v, d_out, X [..., C, V].
    """
    module = array_module(state)
    lead, C = chunk.k.shape[:-2], chunk.k.shape[-2]
    R = v - chunk.K_in @ state
    U = _product(chunk.N, chunk.beta[..., None] * R, left="lower")
    dv = chunk.beta[..., None] * X
    dP = d_out @ _transposed(U)
    # On and above the diagonal G is zero: there a dL that is not finite must not meet it.
    dL = module.tril(-(X @ _transposed(U)), -1)
    dbeta = (X * R).sum(axis=-1) + (dL * chunk.G).sum(axis=-1)
    dG = chunk.beta[..., None] * dL

    dQ_in, dK_in = d_out @ _transposed(state), -(dv @ _transposed(state))
    dK_out = U @ _transposed(d_state_out)
    d_total = (state * d_state_out).sum(axis=-1)

    dq, dk = chunk.into * dQ_in, chunk.into * dK_in + chunk.out_of * dK_out
    d_prefix = chunk.K_in * dK_in + chunk.Q_in * dQ_in
    d_prefix[..., -1, :] += chunk.total * d_total
    d_suffix = chunk.K_out * dK_out
    diagonal = module.einsum("...cc->...c", dP)[..., None]
    dq += diagonal * chunk.k
    dk += diagonal * chunk.q

    dG, dP = dG[..., None, :, :], dP[..., None, :, :]
    h = C // 2
    for level in reversed(chunk.levels):
        halves = lambda x: x.reshape(lead + (C // (2 * h), 2, h) + x.shape[-1:])
        dG, lower_dG = _split(dG, h)
        dP, lower_dP = _split(dP, h)
        columns = halves(chunk.k)[..., 0, :, :] * level.columns
        k_rows = halves(chunk.k)[..., 1, :, :] * level.rows
        q_rows = halves(chunk.q)[..., 1, :, :] * level.rows
        d_k_rows, d_q_rows = lower_dG @ columns, lower_dP @ columns
        d_columns = _transposed(lower_dG) @ k_rows + _transposed(lower_dP) @ q_rows
        halves(dk)[..., 1, :, :] += level.rows * d_k_rows
        halves(dq)[..., 1, :, :] += level.rows * d_q_rows
        halves(dk)[..., 0, :, :] += level.columns * d_columns
        prefix_halves, suffix_halves = halves(d_prefix), halves(d_suffix)
        # The sums' growth reversed: totals receive what their growth handed out, before this level adds its own.
        first_total = prefix_halves[..., 1, :, :].sum(axis=-2)
        second_total = suffix_halves[..., 0, :, :].sum(axis=-2)
        prefix_halves[..., 0, -1, :] += first_total
        prefix_halves[..., 1, -1, :] += second_total
        prefix_halves[..., 1, :, :] += k_rows * d_k_rows + q_rows * d_q_rows
        suffix_halves[..., 0, :, :] += columns * d_columns
        h //= 2
    return ChunkGradients(q=dq, k=dk, v=dv, log_decay=d_prefix, beta=dbeta)


def _product(a, b, left=None, right=None):
    """a @ b, in which a value that is not finite spoils only the results that depend on it.

    left, right: "lower" or "upper" where a, or b, is a triangular matrix with its diagonal: its other elements are zero
    because nothing depends on them, and NaN times such a zero is no result.
    """
    module = array_module(a)
    product = a @ b
    if module.isfinite(product).all():
        return product
    bad_a, bad_b = ~module.isfinite(a), ~module.isfinite(b)
    product = module.where(bad_a, a.dtype.type(0), a) @ module.where(bad_b, b.dtype.type(0), b)
    count = lambda bad: bad.astype("f4")
    spoiled = count(bad_a) @ count(_support(b, right)) + count(_support(a, left)) @ count(bad_b)
    product[spoiled > 0] = module.nan
    return product


def _support(x, shape):
    """Where the matrices x may differ from zero, [rows, columns]; shape: "lower", "upper" or None, everywhere."""
    module = array_module(x)
    full = module.ones(x.shape[-2:], bool)
    if shape is None:
        return full
    return module.tril(full) if shape == "lower" else module.triu(full)


def _transposed(x):
    return array_module(x).swapaxes(x, -1, -2)
