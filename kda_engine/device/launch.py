"""The one way a kernel is launched."""

import ctypes
import struct
import threading
from contextlib import ExitStack, contextmanager
from functools import cache

import cupy

from .kernels import KERNELS
from .kernels.table import INTEGER, POINTER, REAL

# CUDA's limit on gridDim.x.
MOST_BLOCKS = 2**31 - 1

_C_TYPES = {INTEGER: ctypes.c_int32, REAL: ctypes.c_float}

class _Thread(threading.local):
    # Where the thread's launches are written down instead of being made: (Prepared, addresses) of each.
    tape = None


_thread = _Thread()

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


@contextmanager
def taped():
    """Inside, the calling thread's launches are not made but written into a list, which is handed out."""
    _thread.tape = []
    try:
        yield _thread.tape
    finally:
        _thread.tape = None


class Prepared:
    """A kernel of the table on a Device, with all numbers and some pointers of its launches: what every launch is made by.

    name: in the table, or a `Kernel`. order: names of the other pointers, whose addresses every call gives in this order,
    0 for a null pointer. arguments: the rest by name, and `count`, what the grid runs over. To be kept: what was made
    ready for a thread is found again here.
    """

    def __init__(self, name, variant, device, order, **arguments):
        self._made_of = KERNELS[name] if isinstance(name, str) else name, variant, device, order, arguments
        self._thread = threading.local()

    def __call__(self, *addresses):
        """Launch on the current stream; a grid of no blocks launches nothing. Raises ValueError when the grid exceeds the
        device's limit.
        """
        if _thread.tape is not None:
            _thread.tape.append((self, addresses))
            return
        try:
            call = self._thread.call
        except AttributeError:
            call = self._thread.call = _Call(*self._made_of)
        call.start(addresses)


def launch(name, variant, device, **arguments):
    """Launch a kernel on a Device, the current one, by a `Prepared` that is found again for the same numbers.

    name: as for Prepared. arguments: every parameter by name (an array or an address, None for a null pointer, or a
    number), and `count`. Raises as a Prepared does.
    """
    pointers, numbers = _parameters(name)
    addresses = [address(arguments[x]) for x in pointers]
    # A grid may depend on whether a result is wanted.
    device.ready(_prepare, name, variant, tuple([arguments[x] for x in numbers]),
                 tuple([x != 0 for x in addresses]))(*addresses)


@cache
def _parameters(name):
    """Names of the pointers, and of the numbers with `count`."""
    parameters = (KERNELS[name] if isinstance(name, str) else name).parameters
    of_kind = lambda wanted: tuple(x for x, kind in parameters if (kind is POINTER) == wanted)
    return of_kind(True), of_kind(False) + ("count",)


def _prepare(device, name, variant, given, wanted):
    pointers, numbers = _parameters(name)
    return Prepared(name, variant, device, pointers, **dict(zip(pointers, wanted)), **dict(zip(numbers, given)))


def address(x):
    """Of an array, an address itself, None for a null pointer: as an integer."""
    return x.data.ptr if isinstance(x, cupy.ndarray) else x or 0


class _Call:
    """A Prepared for one thread: its arguments have fixed places, whose addresses the driver gets.

    The driver copies the arguments before it returns, so one set of places serves all launches.
    """

    def __init__(self, kernel, variant, device, order, arguments):
        self._name, self._entry = kernel.name, device.function(kernel, variant)
        self._threads, self._shared = kernel.threads(variant), kernel.shared(variant)
        self._blocks = kernel.blocks(arguments)
        if self._blocks > MOST_BLOCKS:
            raise ValueError(f"{kernel.name}: expected at most {MOST_BLOCKS} blocks, got {self._blocks}")
        constant = [name for name, kind in kernel.parameters if kind is POINTER and name not in order]
        self._pointers = (ctypes.c_void_p * (len(order) + len(constant)))(
            *[0] * len(order), *(address(arguments[name]) for name in constant))
        self._pack = struct.Struct(f"{len(order)}P").pack_into
        numbers = [(name, kind) for name, kind in kernel.parameters if kind is not POINTER]
        self._numbers = [_C_TYPES[kind](arguments[name]) for name, kind in numbers]
        places = {name: ctypes.addressof(self._pointers) + 8 * i for i, name in enumerate((*order, *constant))}
        places |= {name: ctypes.addressof(x) for (name, _), x in zip(numbers, self._numbers)}
        self._places = (ctypes.c_void_p * len(places))(*(places[name] for name, _ in kernel.parameters))
        self._address = ctypes.addressof(self._places)
        # What constant pointers point to has to stay.
        self._arguments = arguments

    def start(self, addresses):
        self._pack(self._pointers, 0, *addresses)
        if _observers and self._blocks:
            self._watched()
        elif self._blocks:
            self._launch()

    def _watched(self):
        with ExitStack() as watched:
            for observer in _observers:
                watched.enter_context(observer(self._name))
            self._launch()

    def _launch(self):
        cupy.cuda.driver.launchKernel(self._entry.ptr, self._blocks, 1, 1, self._threads, 1, 1, self._shared,
                                      cupy.cuda.get_current_stream().ptr, self._address, 0)
