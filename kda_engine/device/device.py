"""One CUDA device, and what was made ready on it: compiled kernels, tables of problems, prepared launches."""

import threading
from contextlib import contextmanager
from functools import cache, lru_cache

import cupy

from ..errors import InputError
from . import module, target

# Things made ready that are remembered: of the last few problems all tables and launches.
REMEMBERED = 512

# Tables that nobody remembers any more are given back together, once so many wait for it: each time the host waits for
# all work on the device, for only then is it known that no stream reads them.
RETIRED = 256


class Device:
    """A device by CUDA's number. target: its Target.

    ready(make, *key): make(device, *key), made once, then found again, until much else was made since. Whatever it
    uploads is on the device before anybody can find it. Raises InputError where it would have to be made while the
    current stream is captured.
    """

    def __init__(self, number, of):
        self.number, self.target = number, of
        # A call finds a few things, so `ready` is the look-up itself but where somebody has to hold what is found.
        self.ready = self._found = lru_cache(maxsize=REMEMBERED)(self._make)
        self._functions, self._uploading, self._retired, self._holders = {}, None, [], 0
        self._lock, self._thread = threading.Lock(), threading.local()

    def forget(self):
        """What was made is made anew when it is wanted again."""
        self._found.cache_clear()

    def _make(self, make, *key):
        if capturing():
            raise InputError("stream: expected a call like one that was made before its stream is captured, got the "
                             "first of its kind: make it once before the capture")
        made = make(self, *key)
        if self._uploading is not None:
            self._uploading.synchronize()
        return made

    def upload(self, x):
        """A NumPy array as a table on the device, for `ready`. Its memory stays untouched while work may read it."""
        if len(self._retired) > RETIRED:
            count = len(self._retired)
            cupy.cuda.runtime.deviceSynchronize()
            del self._retired[:count]
        # A stream of its own: what other streams do next must not wait, and what they did before may take long.
        if self._uploading is None:
            self._uploading = cupy.cuda.Stream(non_blocking=True)
        with self._uploading:
            array = cupy.asarray(x)
        return _owned(array, _Lease(array, self._retired)) if array.nbytes else array

    def function(self, kernel, variant):
        """The entry point of a kernel of the table, loaded here."""
        key = kernel.name, variant
        found = self._functions.get(key)
        if found is None:
            with self._lock:
                if capturing():
                    raise InputError(f"stream: expected kernels that were loaded before their stream is captured, got "
                                     f"{kernel.name} for the first time: make the call once before the capture")
                found = self._functions[key] = module.load(kernel, variant, self.number, self.target.architecture)
        return found

    @contextmanager
    def holding(self):
        """Inside, what the calling thread allocates or finds ready is held by a list, which is handed out.

        A captured call is replayed with the memory that it had when it was captured.
        """
        held = self._thread.held = []
        with self._lock:
            self._holders += 1
            self.ready = self._find_and_hold

        def allocate(size):
            memory = pool(size)
            held.append(memory)
            return memory

        pool = cupy.cuda.get_allocator()
        try:
            with cupy.cuda.using_allocator(allocate):
                yield held
        finally:
            self._thread.held = None
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self.ready = self._found

    def _find_and_hold(self, make, *key):
        found, held = self._found(make, *key), getattr(self._thread, "held", None)
        if held is not None:
            held.append(found)
        return found


class _Lease:
    """The memory of a table: once nobody holds it, it waits among the retired."""

    def __init__(self, array, retired):
        self._array, self._retired = array, retired

    def __del__(self):
        self._retired.append(self._array)


def owned(x, owner):
    """The same array, which keeps `owner` alive as well."""
    return _owned(x, (x, owner))


def _owned(x, owner):
    memory = cupy.cuda.UnownedMemory(x.data.ptr, x.nbytes, owner, x.data.device_id)
    return cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0), x.strides)


def capturing():
    """Whether the current stream is captured into a graph."""
    return cupy.cuda.get_current_stream().is_capturing()


def current():
    """The Device that is CuPy's current one. Raises RuntimeError for one older than compute capability 8.0."""
    return of_number(cupy.cuda.runtime.getDevice())


@cache
def of_number(number):
    """The Device of that number."""
    return Device(number, target.of_device(number))
