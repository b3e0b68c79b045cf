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


class Prepared:
    """A kernel's variant, and its arguments that stay the same from launch to launch: all numbers, `count`, some pointers.

    To be kept, for what was made ready for a thread is found again here.
    """

    def __init__(self, variant, **arguments):
        self.variant, self.arguments, self.calls = variant, arguments, threading.local()


def launch(name, variant, target, **arguments):
    """Launch a kernel of the table on the current device and stream.

    variant: of the kernel, or a Prepared. arguments: every parameter by name that is not prepared (an array or an
    address, None for a null pointer, or a number), and `count`, what the grid runs over. A grid of no blocks launches
    nothing. Raises ValueError when the grid exceeds the device's limit.
    """
    device = cupy.cuda.runtime.getDevice()
    if type(variant) is Prepared:
        calls, key = variant.calls.__dict__, device
    else:
        calls, key = _thread.__dict__, (name, variant, device)
    call = calls.get(key)
    if call is None:
        call = calls[key] = _Call(KERNELS[name], variant, device, target.architecture)
    call(arguments)


class _Call:
    """A kernel ready to be launched from one thread: its arguments have fixed places, whose addresses the driver gets.

    The driver copies the arguments before it returns, so one set of places serves all launches.
    """

    def __init__(self, kernel, variant, device, architecture):
        prepared = {}
        if type(variant) is Prepared:
            variant, prepared = variant.variant, variant.arguments
        self._kernel, self._entry = kernel, module.function(kernel, variant, device, architecture).kernel
        self._threads, self._shared = kernel.threads(variant), kernel.shared(variant)
        pointers = [name for name, kind in kernel.parameters if kind is POINTER]
        changing = [name for name in pointers if name not in prepared]
        constant = [name for name in pointers if name in prepared]
        self._pick_pointers, self._pack = itemgetter(*changing), struct.Struct(f"{len(changing)}P").pack_into
        known = _addresses(prepared[name] for name in constant)
        self._pointers = (ctypes.c_void_p * len(pointers))(*[0] * len(changing), *known)
        numbers = [(name, _C_TYPES[kind]) for name, kind in kernel.parameters if kind is not POINTER]
        layout = type("Numbers", (ctypes.Structure,), {"_fields_": numbers})
        self._numbers, self._written = layout(), None
        places = {name: ctypes.addressof(self._pointers) + 8 * i for i, name in enumerate(changing + constant)}
        places |= {name: ctypes.addressof(self._numbers) + getattr(layout, name).offset for name, _ in numbers}
        self._places = (ctypes.c_void_p * len(places))(*(places[name] for name, _ in kernel.parameters))
        self._address = ctypes.addressof(self._places)
        self._pick_numbers = itemgetter(*(name for name, _ in numbers))
        self._blocks = self._set_numbers(prepared) if prepared else None

    def __call__(self, arguments):
        blocks = self._set_numbers(arguments) if self._blocks is None else self._blocks
        if blocks == 0:
            return
        self._pack(self._pointers, 0, *_addresses(self._pick_pointers(arguments)))
        cupy.cuda.driver.launchKernel(self._entry.ptr, blocks, 1, 1, self._threads, 1, 1, self._shared,
                                      cupy.cuda.get_current_stream().ptr, self._address, 0)

    def _set_numbers(self, arguments):
        """Returns the number of blocks."""
        blocks = self._kernel.blocks(arguments)
        if blocks > MOST_BLOCKS:
            raise ValueError(f"{self._kernel.name}: expected at most {MOST_BLOCKS} blocks, got {blocks}")
        # Most numbers are those of the last launch.
        numbers = self._pick_numbers(arguments)
        if numbers != self._written:
            self._written = None
            for name, _ in self._numbers._fields_:
                setattr(self._numbers, name, arguments[name])
            self._written = numbers
        return blocks


def _addresses(pointers):
    return [x.data.ptr if isinstance(x, cupy.ndarray) else x or 0 for x in pointers]
