"""The one way a kernel is launched."""

import ctypes
import struct
import threading
from contextlib import ExitStack, contextmanager
from operator import itemgetter

import cupy

from .kernels import INTEGER, KERNELS, POINTER, REAL

# CUDA's limit on gridDim.x.
MOST_BLOCKS = 2**31 - 1

_C_TYPES = {INTEGER: ctypes.c_int32, REAL: ctypes.c_float}

_thread = threading.local()

# Who wants to know of launches: each is called with a kernel's name and gives a context that the launch happens in.
_observers = []


@contextmanager
def observed(observer):
    """Inside, every launch happens in a context that `observer` gives for the kernel's name."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class Prepared:
    """A kernel of the table on a Device, with all numbers and some pointers of its launches.

    order: names of the other pointers, whose addresses every call gives in this order, 0 for a null pointer.
    arguments: the rest by name, and `count`, as for `launch`. To be kept: what was made ready for a thread is found
    again here.
    """

    def __init__(self, name, variant, device, order, **arguments):
        self._made_of = KERNELS[name], variant, device, order, arguments
        self._thread = threading.local()

    def __call__(self, *addresses):
        """Launch on the current stream. Raises ValueError when the grid exceeds the device's limit."""
        try:
            call, blocks = self._thread.ready
        except AttributeError:
            call = _Call(*self._made_of)
            blocks = call.set_numbers(call.fixed)
            self._thread.ready = call, blocks
        call.set_pointers(addresses)
        call.start(blocks)


def launch(name, variant, device, **arguments):
    """Launch a kernel of the table on a Device, the current one, and on the current stream.

    name: in the table, or a `Kernel`. arguments: every parameter by name (an array or an address, None for a null
    pointer, or a number), and `count`, what the grid runs over. A grid of no blocks launches nothing. Raises ValueError when the grid exceeds the device's limit.
    """
    calls, key = _thread.__dict__, (device, name, variant)
    call = calls.get(key)
    if call is None:
        kernel = KERNELS[name] if isinstance(name, str) else name
        call = calls[key] = _Call(kernel, variant, device)
    blocks = call.set_numbers(arguments)
    call.set_pointers([address(arguments[name]) for name in call.order])
    call.start(blocks)


def address(x):
    """Of an array, an address itself, None for a null pointer: as an integer."""
    return x.data.ptr if isinstance(x, cupy.ndarray) else x or 0


class _Call:
    """A kernel ready to be launched from one thread: its arguments have fixed places, whose addresses the driver gets.

    The driver copies the arguments before it returns, so one set of places serves all launches. order: names of the
    pointers that each launch gives; fixed: what the other parameters are by name, where not all pointers are given.
    """

    def __init__(self, kernel, variant, device, order=None, fixed=None):
        self._kernel, self._entry = kernel, device.function(kernel, variant)
        self._threads, self._shared = kernel.threads(variant), kernel.shared(variant)
        pointers = [name for name, kind in kernel.parameters if kind is POINTER]
        self.order, self.fixed = tuple(pointers if order is None else order), fixed
        constant = [name for name in pointers if name not in self.order]
        self._pack = struct.Struct(f"{len(self.order)}P").pack_into
        self._pointers = (ctypes.c_void_p * len(pointers))(*[0] * len(self.order),
                                                           *(address(fixed[name]) for name in constant))
        numbers = [(name, _C_TYPES[kind]) for name, kind in kernel.parameters if kind is not POINTER]
        layout = type("Numbers", (ctypes.Structure,), {"_fields_": numbers})
        self._numbers, self._written = layout(), None
        places = {name: ctypes.addressof(self._pointers) + 8 * i for i, name in enumerate((*self.order, *constant))}
        places |= {name: ctypes.addressof(self._numbers) + getattr(layout, name).offset for name, _ in numbers}
        self._places = (ctypes.c_void_p * len(places))(*(places[name] for name, _ in kernel.parameters))
        self._address = ctypes.addressof(self._places)
        self._pick_numbers = itemgetter(*(name for name, _ in numbers))

    def set_pointers(self, addresses):
        self._pack(self._pointers, 0, *addresses)

    def set_numbers(self, arguments):
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

    def start(self, blocks):
        if _observers and blocks:
            self._watched(blocks)
        elif blocks:
            cupy.cuda.driver.launchKernel(self._entry.ptr, blocks, 1, 1, self._threads, 1, 1, self._shared,
                                          cupy.cuda.get_current_stream().ptr, self._address, 0)

    def _watched(self, blocks):
        """`start`, with observers."""
        with ExitStack() as watched:
            for observer in _observers:
                watched.enter_context(observer(self._kernel.name))
            cupy.cuda.driver.launchKernel(self._entry.ptr, blocks, 1, 1, self._threads, 1, 1, self._shared,
                                          cupy.cuda.get_current_stream().ptr, self._address, 0)
