"""The one way a kernel is launched."""

import ctypes
import threading

import cupy

from . import module
from .kernels import INTEGER, KERNELS, POINTER, REAL

# CUDA's limit on gridDim.x.
MOST_BLOCKS = 2**31 - 1

_C_TYPES = {POINTER: ctypes.c_void_p, INTEGER: ctypes.c_int32, REAL: ctypes.c_float}

_thread = threading.local()


def launch(name, variant, target, **arguments):
    """Launch a kernel of the table on the current device and stream.

    arguments: every parameter by name (an array or an address, None for a null pointer, or a number), and `count`,
    what the grid runs over. A grid of no blocks launches nothing. Raises ValueError when the grid exceeds the device's
    limit.
    """
    kernel = KERNELS[name]
    blocks = kernel.blocks(arguments)
    if blocks == 0:
        return
    if blocks > MOST_BLOCKS:
        raise ValueError(f"{name}: expected at most {MOST_BLOCKS} blocks, got {blocks}")
    key = (name, variant, cupy.cuda.runtime.getDevice())
    calls = _thread.__dict__
    call = calls.get(key)
    if call is None:
        call = calls[key] = _Call(kernel, variant, key[2], target.architecture)
    call(blocks, arguments)


class _Call:
    """A kernel ready to be launched from one thread: its arguments have fixed places, whose addresses the driver gets.

    The driver copies the arguments before it returns, so one set of places serves all launches.
    """

    def __init__(self, kernel, variant, device, architecture):
        self._entry = module.function(kernel, variant, device, architecture).kernel
        self._threads, self._shared = kernel.threads(variant), kernel.shared(variant)
        self._parameters = [(name, kind is POINTER) for name, kind in kernel.parameters]
        fields = [(name, _C_TYPES[kind]) for name, kind in kernel.parameters]
        layout = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
        self._arguments = layout()
        start = ctypes.addressof(self._arguments)
        self._places = (ctypes.c_void_p * len(fields))(*(start + getattr(layout, name).offset for name, _ in fields))

    def __call__(self, blocks, arguments):
        for name, is_pointer in self._parameters:
            value = arguments[name]
            if is_pointer and value is not None and type(value) is not int:
                value = value.data.ptr
            setattr(self._arguments, name, value)
        cupy.cuda.driver.launchKernel(self._entry.ptr, blocks, 1, 1, self._threads, 1, 1, self._shared,
                                      cupy.cuda.get_current_stream().ptr, ctypes.addressof(self._places), 0)
