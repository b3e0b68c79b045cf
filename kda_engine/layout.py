"""Shapes: the one place where arguments are checked and brought to packed, variable-length form."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from .arrays import array_module, as_array, as_float_array
from .errors import InputError

# Tokens per chunk of the cut grid: ranks and sub-segments are cut, and decay decisions taken, on
# multiples of it counted from each sequence's start. Engines may compute in larger chunks.
CHUNK = 16

_PER_TOKEN = ("q", "k", "v", "g", "beta")
# What decides the type of states and of the arithmetic.
_WORKING = (*_PER_TOKEN, "A_log", "dt_bias", "initial_state")
_FLOAT32, _FLOAT64 = np.dtype("f4"), np.dtype("f8")

# Shapes and bounds of calls that are remembered, so that the next call with the same ones is checked by a comparison.
_REMEMBERED = 64


# Made in every call and therefore not frozen, which would take several times as long; nobody assigns to its fields.
@dataclass
class Operands:
    """One packed, variable-length problem; every array in one array module, types as given.

    q, k [T,H,K]; v [T,HV,V]; g [T,HV,K]; beta [T,HV]; A_log [HV] or None; dt_bias [HV,K] or None;
    cu_seqlens: NumPy int64 [N+1], first 0, last T.
    state_dtype: float64 if any input of the call is, else float32: the type of states and of the arithmetic.
    """

    q: object
    k: object
    v: object
    g: object
    beta: object
    A_log: object
    dt_bias: object
    cu_seqlens: np.ndarray
    state_dtype: np.dtype

    @property
    def tokens(self):
        return self.k.shape[0]

    @property
    def sequences(self):
        return len(self.cu_seqlens) - 1

    @property
    def heads(self):
        """H, the query/key heads."""
        return self.k.shape[1]

    @property
    def value_heads(self):
        """HV, the value heads; value head h reads query/key head h // (HV / H)."""
        return self.v.shape[1]

    @property
    def K(self):
        return self.k.shape[2]

    @property
    def V(self):
        return self.v.shape[2]

    @property
    def state_shape(self):
        """[N, HV, K, V]"""
        return (self.sequences, self.value_heads, self.K, self.V)

    def slice_tokens(self, start, stop, cu_seqlens=None):
        """The tokens [start, stop) as a problem of their own (views); one sequence unless said otherwise."""
        if cu_seqlens is None:
            cu_seqlens = np.array([0, stop - start], dtype=np.int64)
        return self.take_tokens(slice(start, stop), cu_seqlens)

    def take_tokens(self, tokens, cu_seqlens):
        """The given tokens (slice or index array) as a problem of their own with those bounds."""
        return replace(self, cu_seqlens=cu_seqlens, **{name: getattr(self, name)[tokens] for name in _PER_TOKEN})

    def take_heads(self, value_heads):
        """Only the given value heads (index array); q and k are then repeated per value head."""
        shared = np.asarray(value_heads) // (self.value_heads // self.heads)
        pick = lambda x: None if x is None else x[value_heads]
        return replace(self, q=self.q[:, shared], k=self.k[:, shared], v=self.v[:, value_heads],
                       g=self.g[:, value_heads], beta=self.beta[:, value_heads],
                       A_log=pick(self.A_log), dt_bias=pick(self.dt_bias))


@dataclass(frozen=True)
class Packing:
    """How the caller's arrays were shaped, so that results can be handed back alike.

    batch: (B, tokens of each sequence), or None when the input was packed already.
    """

    batch: tuple | None

    def unpack(self, x):
        """[T, ...] back to [B, T/B, ...] when the input was batched."""
        return x if x is None or self.batch is None else x.reshape(self.batch + x.shape[1:])


def pack(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, gate, initial_state=None):
    """Check all operands of one call and pack a batch into one variable-length problem.

    Shapes as in `Operands`, or with a leading batch axis. q may be None (no output is wanted). The initial state
    counts for the working type only; `state_in` checks it.
    Returns (Operands, Packing). Raises InputError naming the argument.
    """
    if q is not None:
        q = as_float_array("q", q)
    k = as_float_array("k", k)
    v = as_float_array("v", v)
    g = as_float_array("g", g)
    beta = as_float_array("beta", beta)
    if not type(q) is type(k) is type(v) is type(g) is type(beta):
        _check_sides(q, k, v, g, beta)
    shape = _check_shapes(None if q is None else q.shape, k.shape, v.shape, g.shape, beta.shape)
    bounds, batch = shape.bounds, shape.packing.batch
    if q is None:
        q = k
    if batch is not None:
        if cu_seqlens is not None and batch[0] != 1:
            raise InputError(f"cu_seqlens: expected packed input or batch 1 beside it, got batch {batch[0]}")
        q, k, v, g, beta = [x.reshape(packed) for x, packed in zip((q, k, v, g, beta), shape.packed)]
    if cu_seqlens is not None:
        bounds = check_cu_seqlens(cu_seqlens, shape.tokens)

    if initial_state is not None:
        initial_state = as_array("initial_state", initial_state)
    if gate == "log":
        A_log = dt_bias = None
    if A_log is not None:
        A_log = _parameter("A_log", A_log, shape.A_log, k)
    if dt_bias is not None:
        dt_bias = _parameter("dt_bias", dt_bias, shape.dt_bias, k)
    given = dict(zip(_WORKING, (q, k, v, g, beta, A_log, dt_bias, initial_state)))
    state_dtype = working_type({name: x.dtype for name, x in given.items() if x is not None}, gate)
    return Operands(q, k, v, g, beta, A_log, dt_bias, bounds, state_dtype), shape.packing


def _check_sides(*arrays):
    """Raises InputError unless one array module made all of q, k, v, g and beta; q may be None."""
    module = array_module(arrays[_PER_TOKEN.index("k")])
    for name, x in zip(_PER_TOKEN, arrays):
        if x is not None and array_module(x) is not module:
            raise InputError(f"{name}: expected an array on the same side as k ({module.__name__}), got {type(x)}")


@dataclass(frozen=True)
class _Shape:
    """What the shapes of a call's per-token arrays say: tokens in all; the bounds of the sequences where no others are
    given, read-only; the shapes of q, k, v, g and beta as in `Operands`; those that the parameters must have.
    """

    packing: Packing
    tokens: int
    bounds: np.ndarray
    packed: tuple
    A_log: tuple
    dt_bias: tuple


@lru_cache(maxsize=_REMEMBERED)
def _check_shapes(*shapes):
    """The _Shape for the shapes of q (None when absent), k, v, g and beta."""
    given = {name: shape for name, shape in zip(_PER_TOKEN, shapes) if shape is not None}
    k, v = given["k"], given["v"]
    batched = len(k) == 4
    for name, shape in given.items():
        expected = (4 if batched else 3) - (name == "beta")
        if len(shape) != expected:
            raise InputError(f"{name}: expected {expected} dimensions beside k{k}, got shape {shape}")
    lead = k[: 2 if batched else 1]
    H, K = k[-2:]
    HV, V = v[-2:]
    if H == 0 or HV == 0 or K == 0 or V == 0:
        raise InputError(f"k, v: expected at least one head and channel, got k{k}, v{v}")
    if HV % H:
        raise InputError(f"v: expected a multiple of {H} value heads (q and k have {H}), got {HV}")
    shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "g": (HV, K), "beta": (HV,)}
    for name, shape in given.items():
        if shape != lead + shapes[name]:
            raise InputError(f"{name}: expected shape {lead + shapes[name]}, got {shape}")
    batch, length = lead if batched else (1, lead[0])
    bounds = np.arange(batch + 1, dtype=np.int64) * length
    bounds.flags.writeable = False
    tokens = batch * length
    packed = tuple((tokens,) + shapes[name] for name in _PER_TOKEN)
    return _Shape(Packing(lead if batched else None), tokens, bounds, packed, (HV,), (HV, K))


def check_cu_seqlens(cu_seqlens, tokens):
    """cu_seqlens as NumPy int64 [N+1], read-only; raises InputError unless it runs from 0 to `tokens` without falling.
    """
    bounds = as_array("cu_seqlens", cu_seqlens)
    bounds = np.asarray(bounds.get() if hasattr(bounds, "get") else bounds)
    if bounds.dtype.kind not in "iu" or bounds.ndim != 1 or len(bounds) < 1:
        raise InputError(f"cu_seqlens: expected integers [N+1], got {bounds.dtype} {bounds.shape}")
    return _check_bounds(bounds.astype(np.int64).tobytes(), tokens)


@lru_cache(maxsize=_REMEMBERED)
def _check_bounds(cu_seqlens, tokens):
    """`check_cu_seqlens` of the bytes of int64."""
    bounds = np.frombuffer(cu_seqlens, dtype=np.int64)
    falls = np.flatnonzero(bounds[1:] < bounds[:-1])
    if falls.size:
        i = int(falls[0])
        raise InputError(f"cu_seqlens: expected non-decreasing bounds, got {bounds[i]} then {bounds[i + 1]} "
                         f"at index {i}")
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise InputError(f"cu_seqlens: expected to start at 0 and end at T = {tokens}, got {bounds[0]} and "
                         f"{bounds[-1]}")
    return bounds


def state_in(name, state, operands, state_layout):
    """A state argument in [N,HV,K,V] order and the working type, itself where it is that already; zeros when absent."""
    if state is None:
        return zero_states(operands)
    module = array_module(operands.k)
    state = as_float_array(name, state)
    N, HV, K, V = operands.state_shape
    expected = (N, HV, K, V) if state_layout == "KV" else (N, HV, V, K)
    if state.shape != expected:
        raise InputError(f"{name}: expected shape {expected} (state_layout {state_layout!r}), got {state.shape}")
    if array_module(state) is not module:
        raise InputError(f"{name}: expected an array on the same side as k ({module.__name__}), got {type(state)}")
    if state_layout == "VK":
        state = state.swapaxes(2, 3)
    return module.ascontiguousarray(state.astype(operands.state_dtype, copy=False))


def zero_states(operands):
    """The initial states [N,HV,K,V] of a call without any."""
    return array_module(operands.k).zeros(operands.state_shape, dtype=operands.state_dtype)


def state_out(state, state_layout):
    """A state [..,K,V] in the caller's layout."""
    if state_layout == "KV":
        return state
    return array_module(state).ascontiguousarray(state.swapaxes(-1, -2))


def gradient_in(name, gradient, operands, packing):
    """d_out, which lies where the operands do, as packed [T,HV,V]; raises InputError when shape or type do not fit."""
    gradient = as_float_array(name, gradient)
    expected = (operands.tokens, operands.value_heads, operands.V)
    shown = packing.unpack(operands.v).shape
    if gradient.shape != shown:
        raise InputError(f"{name}: expected shape {shown}, got {gradient.shape}")
    return gradient.reshape(expected)


def working_type(types, gate):
    """The type of states and of the arithmetic: float64 where one of the operands or the initial state is, else float32.

    types: NumPy types by name; other names than those of operands do not count, nor do parameters that the gate form does
    not read.
    """
    read = _WORKING[:5] + _WORKING[7:] if gate == "log" else _WORKING
    return _FLOAT64 if any(name in types and types[name] == _FLOAT64 for name in read) else _FLOAT32


def _parameter(name, x, shape, k):
    """A_log or dt_bias, on the side of k: taken there from the host, but not from a device."""
    x = as_float_array(name, x)
    if x.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, got {x.shape}")
    if type(x) is type(k):
        return x
    module = array_module(k)
    if array_module(x) is module:
        return x
    if module is np:
        raise InputError(f"{name}: expected an array on the same side as k (numpy), got {type(x)}")
    return module.asarray(x)
