"""The current CUDA device: how calls are timed, and what rates are within reach."""

from contextlib import contextmanager

import cupy
import ml_dtypes
import numpy as np

from ..device.launch import observed
from ..layout import CHUNK
from . import peers, timing
from .clocks import read_clocks
from .graph import Replay
from .memory import PeakMemory
from .samples import median

# Rows of the control's matrices: a tenth of a millisecond on a large device.
CONTROL_SIZE = 3072


class Device:
    """The engine "cuda" with bfloat16 inputs on CuPy's current device."""

    engine, module, dtype, chunk_length = "cuda", cupy, np.dtype(ml_dtypes.bfloat16), CHUNK
    # What results are held against: in float64 it agrees with the token recurrence to 1e-11 (tests/test_chunked.py), and
    # a quarter of a million tokens take it seconds.
    oracle = "numpy"

    def __init__(self):
        self._device = cupy.cuda.Device()

    def describe(self):
        """What a record calls this machine; records of other machines cannot be compared with it."""
        return {"name": cupy.cuda.runtime.getDeviceProperties(self._device.id)["name"].decode()}

    def state(self):
        """Clocks, and what holds them down, now; empty where NVML cannot be asked."""
        return read_clocks(self._device.pci_bus_id) or {}

    def bandwidth(self):
        """Bytes per second, read plus written, of a large copy."""
        return timing.copy_bandwidth()

    def matrix_rate(self, size=8192, samples=10):
        """FLOP/s of a float16 matrix product of that size, which runs at bfloat16's rate."""
        a, b = (cupy.random.standard_normal((size, size), dtype="f4").astype("f2") for _ in range(2))
        return 2 * size**3 / median(self.measure({"product": lambda: a @ b}, samples, cold=True)["product"])

    def control(self):
        """A call that is always the same work: how long it takes tells how fast the device is just now."""
        x = cupy.ones((CONTROL_SIZE, CONTROL_SIZE), "f2")
        return lambda: x @ x

    def measure(self, calls, samples, cold):
        """Seconds of every sample of each call, by the same names, the calls in turn.

        cold: the L2 cache holds nothing of the call's data.
        """
        return {name: [1e-3 * x for x in taken.raw]
                for name, taken in timing.measure(calls, samples, cold=cold).items()}

    def synchronize(self):
        """Until everything that was launched is done."""
        self._device.synchronize()

    def host_seconds(self, call):
        """The time that one call keeps the host busy."""
        return timing.host_seconds(call, samples=20)

    def peak_bytes(self, call):
        """Device memory that one call takes at most beyond what is there before it."""
        with PeakMemory() as memory:
            call()
        return memory.peak

    def capture(self, call):
        """A function that replays the call's kernels as one CUDA graph."""
        return Replay(call)

    def kernel_seconds(self, call, samples):
        """Kernel name -> seconds of every sample: all launches of that kernel in one call together.

        Events between the kernels keep them from overlapping, so the sum is a little more than the whole call.
        """
        call()
        taken = {}
        for _ in range(samples):
            with timed_launches() as events:
                call()
            self._device.synchronize()
            sums = {}
            for name, start, stop in events:
                sums[name] = sums.get(name, 0.0) + 1e-3 * cupy.cuda.get_elapsed_time(start, stop)
            for name, seconds in sums.items():
                taken.setdefault(name, []).append(seconds)
        return taken

    def peers(self):
        """Name -> adapter of every other implementation that is installed."""
        return peers.available()


@contextmanager
def timed_launches():
    """A list of (kernel's name, event before, event after) of every launch from here on."""
    events = []

    @contextmanager
    def timed(name):
        before, after = cupy.cuda.Event(), cupy.cuda.Event()
        before.record()
        yield
        after.record()
        events.append((name, before, after))

    with observed(timed):
        yield events
