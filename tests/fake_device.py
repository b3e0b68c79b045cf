"""CuPy without a device: real arrays at addresses that nobody may read, a driver that writes down what is launched.

A GPU in this machine is not touched either.
"""

import ctypes
import itertools
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import cupy
import numpy as np
from cupy.cuda import memory

from kda_engine import engines, layout
from kda_engine.device import device as devices
from kda_engine.device import launch, target
from kda_engine.device.kernels import KERNELS
from kda_engine.device.kernels.table import INTEGER, POINTER, REAL
from kda_engine.engines import cuda_usable

_READ = {POINTER: ctypes.c_size_t, INTEGER: ctypes.c_int32, REAL: ctypes.c_float}
_ALIGNMENT = 256

# No two devices share an address.
_starts = itertools.count(FIRST_ADDRESS := 1 << 40, 1 << 40)


class FakeDevice:
    """launches: (kernel, variant, blocks, arguments by name) in order. allocations: bytes of each, in order. uploads:
    address -> NumPy array, of all arrays made from the host's. capturing: whether the stream is captured. device: the
    Device that kernels are launched on.
    """

    def __init__(self):
        self.launches, self.allocations, self.uploads = [], [], {}
        self.capturing, self._next = False, next(_starts)

    def array(self, shape, dtype, number=0):
        """number: of the device that it lies on."""
        return cupy.ndarray(shape, dtype, memptr=self._place(int(np.prod(shape)) * np.dtype(dtype).itemsize, number))

    def allocate(self, size):
        self.allocations.append(size)
        return self._place(size)

    def upload(self, x, *given, **more):
        if isinstance(x, cupy.ndarray):
            return x
        array = self.array(x.shape, x.dtype)
        self.uploads[array.data.ptr] = x.copy()
        return array

    def launch(self, entry, blocks, *given):
        # CUDA's order: grid y and z, block x to z, shared memory, stream, addresses of the arguments, extra.
        kernel, variant = entry
        addresses = ctypes.cast(given[-2], ctypes.POINTER(ctypes.c_void_p))
        arguments = {name: _READ[kind].from_address(addresses[i]).value
                     for i, (name, kind) in enumerate(KERNELS[kernel].parameters)}
        self.launches.append((kernel, variant, blocks, arguments))

    def _place(self, size, number=0):
        start = self._next
        self._next += (size // _ALIGNMENT + 1) * _ALIGNMENT
        return memory.MemoryPointer(memory.UnownedMemory(start, size, None, number), 0)


class _Device(devices.Device):
    """With nothing behind it; tables are those of a FakeDevice."""

    def __init__(self, fake, name):
        super().__init__(0, target.KNOWN[name])
        self.upload = fake.upload

    def function(self, kernel, variant):
        return SimpleNamespace(ptr=(kernel.name, variant))


def _forget():
    """What is remembered of arguments and of engines, whatever the device."""
    for cached in (layout._check_shapes, layout._check_bounds, engines._cuda_engine, cuda_usable):
        cached.cache_clear()


@contextmanager
def fake_device(name="sm_90a"):
    """A FakeDevice in CuPy's place, of a target by name."""
    device = FakeDevice()
    device.device = _Device(device, name)
    stream = SimpleNamespace(ptr=0, is_capturing=lambda: device.capturing)
    with ExitStack() as stack:
        for owner, attribute, value in (
            (cupy.cuda.runtime, "getDevice", lambda: 0),
            (cupy.cuda.runtime, "getDeviceCount", lambda: 1),
            (cupy.cuda.runtime, "getDeviceProperties", lambda device: {"major": 9}),
            (target, "of_device", lambda number: target.KNOWN[name]),
            (devices, "of_number", lambda number: device.device),
            (cupy.cuda.driver, "launchKernel", device.launch),
            (cupy.cuda, "get_current_stream", lambda: stream),
            (cupy, "asarray", device.upload),
            (cupy, "zeros", lambda *given, **more: _refuse("zeros")),
        ):
            stack.enter_context(patch.object(owner, attribute, value))
        stack.enter_context(cupy.cuda.using_allocator(device.allocate))
        _forget()
        yield device
    _forget()


def _refuse(what):
    raise AssertionError(f"cupy.{what} was called")
