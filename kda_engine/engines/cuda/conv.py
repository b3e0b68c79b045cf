"""The short convolution and its adjoint by kernel."""

import cupy
import numpy as np

from ...device.device import current
from ...device.kernels.table import ELEMENT_OF, element_variant
from ...device.launch import launch
from ...device.plans.tables import make_tables
from .problem import check_device


def covers(given):
    """Whether the kernel takes x's type (a `ConvArguments`); conv.py's array expressions take all."""
    return isinstance(given.x, cupy.ndarray) and given.x.dtype in ELEMENT_OF


def short_conv(given):
    """The convolution's output, shaped and typed as x, of `ConvArguments` that the kernel covers."""
    device = _device(given)
    tables = device.ready(make_tables, given.cu_seqlens.tobytes())
    y = cupy.empty(given.x.shape, given.x.dtype)
    channels, taps = given.weight.shape
    launch("short_conv", element_variant(ELEMENT_OF[given.x.dtype]), device, count=tables.chunks,
           x=_contiguous(given.rows), weight=_contiguous(given.weight), bias=_contiguous(given.bias),
           halo=_contiguous(given.halo), cu_seqlens=tables.cu_seqlens, chunk_offsets=tables.chunk_offsets,
           sequences=len(given.cu_seqlens) - 1, channels=channels, taps=taps, silu=given.activation == "silu", y=y)
    return y


def short_conv_backward(given, dy):
    """(dx typed as x, dweight, dbias or None, dhalo), as `conv.short_conv_backward`; dy: shaped as `given.rows`."""
    x = given.rows
    if dy.dtype != x.dtype:
        x, dy = x.astype("f4"), dy.astype("f4")
    (channels, taps), sequences = given.weight.shape, len(given.cu_seqlens) - 1
    # The rows that the kernel works through: every sequence behind its halo.
    bounds = given.cu_seqlens + np.arange(sequences + 1) * (taps - 1)
    device = _device(given)
    check_device("dy", dy, device)
    tables = device.ready(make_tables, bounds.astype(np.int64).tobytes())
    dx = cupy.empty(x.shape, x.dtype)
    dhalo = cupy.empty((sequences, taps - 1, channels), "f4")
    partials = cupy.empty((tables.chunks, taps + 1, channels), "f4")
    launch("short_conv_backward", element_variant(ELEMENT_OF[x.dtype]), device, count=tables.chunks,
           dy=_contiguous(dy), x=_contiguous(x), weight=_contiguous(given.weight), bias=_contiguous(given.bias),
           halo=_contiguous(given.halo), bounds=tables.cu_seqlens, chunk_offsets=tables.chunk_offsets,
           sequences=sequences, channels=channels, taps=taps, silu=given.activation == "silu",
           dx=dx, dhalo=dhalo, partials=partials)
    sums = partials.sum(axis=0, dtype="f8").astype("f4")
    dbias = None if given.bias is None else sums[taps]
    return (dx.reshape(given.x.shape).astype(given.x.dtype, copy=False), cupy.ascontiguousarray(sums[:taps].T), dbias,
            dhalo)


def _device(given):
    """The current Device. Raises InputError for arrays on another."""
    device = current()
    for name in ("x", "weight", "bias", "halo"):
        if (x := getattr(given, name)) is not None:
            check_device(name, x, device)
    return device


def _contiguous(x):
    return None if x is None else cupy.ascontiguousarray(x)
