"""The short causal depthwise convolution before q, k and v, and its adjoint; NumPy or CuPy.

    y_t = activation( bias + sum_{w<W} weight[:, w] x_{t-W+1+w} )

within each sequence; tokens before a sequence's start are zero, or come from its halo when a sequence was cut.
"""

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
    padded = _Padded.of(x, weight, bias, activation, cu_seqlens, halo)
    y = _activate(padded.correlate(), activation).astype(padded.x.dtype)
    return like(y.reshape(padded.x.shape), x)


def short_conv_backward(dy, x, weight, bias=None, activation="silu", cu_seqlens=None, halo=None):
    """(dx typed as x, dweight, dbias or None, dhalo [N,W-1,channels]); the last three float32, or float64 as x is.

    dy as the output; the other arguments as in `short_conv`. dhalo is the gradient of the halo (of the zeros before
    each sequence when none was given).
    """
    padded = _Padded.of(x, weight, bias, activation, cu_seqlens, halo)
    module, W = padded.module, padded.weight.shape[1]
    d = as_float_array("dy", dy)
    if d.shape != padded.x.shape:
        raise InputError(f"dy: expected shape {padded.x.shape}, got {d.shape}")
    d = d.reshape(padded.rows.shape).astype(padded.dtype)
    if activation is not None:
        before = padded.correlate()
        s = sigmoid(before)
        d = d * (s + before * s * sigmoid(-before))
    places = padded.places
    d_extended = module.zeros_like(padded.extended)
    dweight = module.empty(padded.weight.shape, "f8")
    for w in range(W):
        # One tap reads each place at most once, so plain indexed addition loses nothing.
        d_extended[places + w] += d * padded.weight[:, w]
        dweight[:, w] = (d * padded.extended[places + w]).sum(axis=0, dtype="f8")
    dx = d_extended[places + W - 1].reshape(padded.x.shape).astype(padded.x.dtype)
    dhalo = d_extended[padded.halo_places]
    dbias = None if bias is None else like(d.sum(axis=0, dtype="f8").astype(padded.dtype), x)
    return like(dx, x), like(dweight.astype(padded.dtype), x), dbias, like(dhalo, x)


def _activate(x, activation):
    return x if activation is None else x * sigmoid(x)


class _Padded:
    """Checked arguments, with every sequence's W-1 earlier tokens put before it: `extended` [T + N (W-1), channels].

    places [T]: where in `extended` the oldest tap of each token lies. halo_places [N,W-1].
    """

    @classmethod
    def of(cls, x, weight, bias, activation, cu_seqlens, halo):
        self = cls()
        if activation not in ("silu", None):
            raise InputError(f"activation: expected 'silu' or None, got {activation!r}")
        self.x, weight = as_float_array("x", x), as_float_array("weight", weight)
        self.module = module = array_module(self.x)
        if self.x.ndim < 2:
            raise InputError(f"x: expected [T, channels] or [T, H, K], got shape {self.x.shape}")
        T, channels = self.x.shape[0], int(np.prod(self.x.shape[1:]))
        if weight.ndim != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
            raise InputError(f"weight: expected shape ({channels}, W), got {weight.shape}")
        self.dtype = np.dtype("f8" if self.x.dtype == np.float64 else "f4")
        self.weight, W = weight.astype(self.dtype), weight.shape[1]
        self.bias = None if bias is None else as_float_array("bias", bias).astype(self.dtype)
        if self.bias is not None and self.bias.shape != (channels,):
            raise InputError(f"bias: expected shape ({channels},), got {self.bias.shape}")
        bounds = np.array([0, T]) if cu_seqlens is None else check_cu_seqlens(cu_seqlens, T)
        N = len(bounds) - 1
        self.rows = self.x.reshape(T, channels)
        sequence_of = np.repeat(np.arange(N), np.diff(bounds))
        self.places = module.asarray(np.arange(T) + sequence_of * (W - 1))
        self.halo_places = module.asarray((bounds[:-1] + np.arange(N) * (W - 1))[:, None] + np.arange(W - 1))
        self.extended = module.zeros((T + N * (W - 1), channels), self.dtype)
        self.extended[self.places + W - 1] = self.rows
        if halo is not None:
            halo = as_float_array("halo", halo)
            if halo.shape != (N, W - 1, channels):
                raise InputError(f"halo: expected shape {(N, W - 1, channels)}, got {halo.shape}")
            self.extended[self.halo_places] = halo
        return self

    def correlate(self):
        """The convolution before its activation, [T, channels]."""
        total = self.module.zeros(self.rows.shape, self.dtype)
        if self.bias is not None:
            total += self.bias
        for w in range(self.weight.shape[1]):
            total += self.weight[:, w] * self.extended[self.places + w]
        return total
