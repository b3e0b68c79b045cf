"""The short causal depthwise convolution before q, k and v, and its adjoint; NumPy or CuPy.

    y_t = activation( bias + sum_{w<W} weight[:, w] x_{t-W+1+w} )

within each sequence; tokens before a sequence's start are zero, or come from its halo when a sequence was cut.
"""

from dataclasses import dataclass

import numpy as np

from .arrays import array_module, as_float_array, like
from .errors import InputError
from .gate import sigmoid
from .layout import check_cu_seqlens


def short_conv(x, weight, bias=None, activation="silu", cu_seqlens=None, halo=None):
    """The convolution's output, shaped and typed as x.

    x [T,H,K] (or [T,channels]); weight [channels,W] with channels = H K; bias [channels]; activation "silu" or None;
    cu_seqlens [N+1]; halo [N,W-1,channels]: the tokens before each sequence's first, oldest first (zeros if None).
    Raises InputError naming the argument.
    """
    given = ConvArguments.of(x, weight, bias, activation, cu_seqlens, halo)
    y = _activate(_Padded(given).correlate(), activation).astype(given.x.dtype)
    return like(y.reshape(given.x.shape), x)


def short_conv_backward(dy, x, weight, bias=None, activation="silu", cu_seqlens=None, halo=None):
    """(dx typed as x, dweight, dbias or None, dhalo [N,W-1,channels]); the last three float32, or float64 as x is.

    dy as the output; the other arguments as in `short_conv`. dhalo is the gradient of the halo (of the zeros before
    each sequence when none was given).
    """
    given = ConvArguments.of(x, weight, bias, activation, cu_seqlens, halo)
    padded, module, W = _Padded(given), array_module(given.x), given.weight.shape[1]
    d = given.take_gradient(dy).astype(given.dtype)
    if activation is not None:
        before = padded.correlate()
        s = sigmoid(before)
        d = d * (s + before * s * sigmoid(-before))
    places = padded.places
    d_extended = module.zeros_like(padded.extended)
    dweight = module.empty(given.weight.shape, "f8")
    for w in range(W):
        # One tap reads each place at most once, so plain indexed addition loses nothing.
        d_extended[places + w] += d * given.weight[:, w]
        dweight[:, w] = (d * padded.extended[places + w]).sum(axis=0, dtype="f8")
    dx = d_extended[places + W - 1].reshape(given.x.shape).astype(given.x.dtype)
    dhalo = d_extended[padded.halo_places]
    dbias = None if bias is None else like(d.sum(axis=0, dtype="f8").astype(given.dtype), x)
    return like(dx, x), like(dweight.astype(given.dtype), x), dbias, like(dhalo, x)


def _activate(x, activation):
    return x if activation is None else x * sigmoid(x)


@dataclass(frozen=True)
class ConvArguments:
    """Checked arguments of one convolution, in the working type but for x.

    x: as given; rows [T,channels]: the same; weight [channels,W]; bias [channels] or None; cu_seqlens: NumPy int64
    [N+1]; halo [N,W-1,channels] or None; dtype: float64 where x is, else float32.
    """

    x: object
    rows: object
    weight: object
    bias: object
    activation: str | None
    cu_seqlens: np.ndarray
    halo: object
    dtype: np.dtype

    @classmethod
    def of(cls, x, weight, bias, activation, cu_seqlens, halo):
        """Raises InputError naming the argument."""
        if activation not in ("silu", None):
            raise InputError(f"activation: expected 'silu' or None, got {activation!r}")
        x, weight = as_float_array("x", x), as_float_array("weight", weight)
        if x.ndim < 2:
            raise InputError(f"x: expected [T, channels] or [T, H, K], got shape {x.shape}")
        T, channels = x.shape[0], int(np.prod(x.shape[1:]))
        if weight.ndim != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
            raise InputError(f"weight: expected shape ({channels}, W), got {weight.shape}")
        dtype = np.dtype("f8" if x.dtype == np.float64 else "f4")
        wide = lambda name, given: None if given is None else as_float_array(name, given).astype(dtype)
        bias, halo = wide("bias", bias), wide("halo", halo)
        if bias is not None and bias.shape != (channels,):
            raise InputError(f"bias: expected shape ({channels},), got {bias.shape}")
        bounds = np.array([0, T]) if cu_seqlens is None else check_cu_seqlens(cu_seqlens, T)
        expected = (len(bounds) - 1, weight.shape[1] - 1, channels)
        if halo is not None and halo.shape != expected:
            raise InputError(f"halo: expected shape {expected}, got {halo.shape}")
        return cls(x, x.reshape(T, channels), weight.astype(dtype), bias, activation, bounds, halo, dtype)

    def take_gradient(self, dy):
        """The output's gradient dy, shaped as `rows`, its type kept. Raises InputError."""
        d = as_float_array("dy", dy)
        if d.shape != self.x.shape:
            raise InputError(f"dy: expected shape {self.x.shape}, got {d.shape}")
        return d.reshape(self.rows.shape)


class _Padded:
    """Every sequence of a convolution with the W-1 tokens before it: `extended` [T + N (W-1), channels].

    places [T]: where in `extended` the oldest tap of each token lies. halo_places [N,W-1].
    """

    def __init__(self, given):
        self._given = given
        module, bounds = array_module(given.x), given.cu_seqlens
        (T, channels), W, N = given.rows.shape, given.weight.shape[1], len(bounds) - 1
        sequence_of = np.repeat(np.arange(N), np.diff(bounds))
        self.places = module.asarray(np.arange(T) + sequence_of * (W - 1))
        self.halo_places = module.asarray((bounds[:-1] + np.arange(N) * (W - 1))[:, None] + np.arange(W - 1))
        self.extended = module.zeros((T + N * (W - 1), channels), given.dtype)
        self.extended[self.places + W - 1] = given.rows
        if given.halo is not None:
            self.extended[self.halo_places] = given.halo

    def correlate(self):
        """The convolution before its activation, [T, channels]."""
        given = self._given
        total = array_module(given.x).zeros(given.rows.shape, given.dtype)
        if given.bias is not None:
            total += given.bias
        for w in range(given.weight.shape[1]):
            total += given.weight[:, w] * self.extended[self.places + w]
        return total
