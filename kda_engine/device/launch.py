"""The one way a kernel is launched."""

import ctypes
import struct
import threading
from operator import itemgetter

import cupy

from . import module
from .kernels import INTEGER, KERNELS, POINTER, REAL

# CUDA's limit on gridDim.x.
MOST_BLOCKS = 2**31 - 1

_C_TYPES = {INTEGER: ctypes.c_int32, REAL: ctypes.c_float}

_thread = threading.local()


def launch(name, variant, target, **arguments):
    """Launch a kernel of the table on the current device and stream.

    arguments: every parameter by name (an array or an address, None for a null pointer, or a number), and `count`,
    what the grid runs over. A grid of no blocks launches nothing. Raises ValueError when the grid exceeds the device's
    limit.
    """
    device = cupy.cuda.runtime.getDevice()
    key = (name, variant, device)
    calls = _thread.__dict__
    call = calls.get(key)
    if call is None:
        call = calls[key] = _Call(KERNELS[name], variant, device, target.architecture)
    call(arguments)


class _Call:
    """A kernel ready to be launched from one thread: its arguments have fixed places, whose addresses the driver gets.

    The driver copies the arguments before it returns, so one set of places serves all launches.
    """

    def __init__(self, kernel, variant, device, architecture):
        self._kernel, self._entry = kernel, module.function(kernel, variant, device, architecture).kernel
        self._threads, self._shared = kernel.threads(variant), kernel.shared(variant)
        names = [[name for name, kind in kernel.parameters if (kind is POINTER) == pointers] for pointers in (True, False)]
        self._pick_pointers, self._pick_numbers = (itemgetter(*some) for some in names)
        self._pack = struct.Struct(f"{len(names[0])}P").pack_into
        self._pointers = (ctypes.c_void_p * len(names[0]))()
        fields = [(name, _C_TYPES[kind]) for name, kind in kernel.parameters if kind is not POINTER]
        layout = type("Numbers", (ctypes.Structure,), {"_fields_": fields})
        self._numbers, self._written = layout(), None
        places = {name: ctypes.addressof(self._pointers) + 8 * i for i, name in enumerate(names[0])}
        places |= {name: ctypes.addressof(self._numbers) + getattr(layout, name).offset for name in names[1]}
        self._places = (ctypes.c_void_p * len(places))(*(places[name] for name, _ in kernel.parameters))
        self._address = ctypes.addressof(self._places)

    def __call__(self, arguments):
        blocks = self._kernel.blocks(arguments)
        if blocks == 0:
            return
        if blocks > MOST_BLOCKS:
            raise ValueError(f"{self._kernel.name}: expected at most {MOST_BLOCKS} blocks, got {blocks}")
        self._pack(self._pointers, 0, *[x.data.ptr if isinstance(x, cupy.ndarray) else x or 0
                                        for x in self._pick_pointers(arguments)])
        # Most numbers are those of the last launch.
        numbers = self._pick_numbers(arguments)
        if numbers != self._written:
            self._written = None
            for name, _ in self._numbers._fields_:
                setattr(self._numbers, name, arguments[name])
            self._written = numbers
        cupy.cuda.driver.launchKernel(self._entry.ptr, blocks, 1, 1, self._threads, 1, 1, self._shared,
                                      cupy.cuda.get_current_stream().ptr, self._address, 0)
