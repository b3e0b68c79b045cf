"""The short convolution by kernel."""

import cupy

from ..device import target
from ..device.kernels import CONV_ELEMENTS, ELEMENT_OF
from ..device.launch import launch
from ..device.plan import make_tables


def covers(given):
    """Whether the kernel takes x's type (a `ConvArguments`); conv.py's array expressions take all."""
    return isinstance(given.x, cupy.ndarray) and given.x.dtype in ELEMENT_OF


def short_conv(given):
    """The convolution's output, shaped and typed as x, of `ConvArguments` that the kernel covers."""
    tables = make_tables(given.cu_seqlens)
    contiguous = lambda x: None if x is None else cupy.ascontiguousarray(x)
    y = cupy.empty(given.x.shape, given.x.dtype)
    channels, taps = given.weight.shape
    launch("short_conv", CONV_ELEMENTS[ELEMENT_OF[given.x.dtype]], target.current(), count=tables.chunks,
           x=contiguous(given.rows), weight=contiguous(given.weight), bias=contiguous(given.bias),
           halo=contiguous(given.halo), cu_seqlens=tables.cu_seqlens, chunk_offsets=tables.chunk_offsets,
           sequences=len(given.cu_seqlens) - 1, channels=channels, taps=taps, silu=given.activation == "silu", y=y)
    return y
