"""This machine's processors as the NumPy engine sees them: how calls are timed, and what rates are within reach."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import ThreadpoolController

from ..engines.host import CHUNK_LENGTH
from ..errors import InputError
from ..threads import thread_count
from .samples import median

# Written between samples: more than the last-level cache of most processors.
FLUSH_BYTES = 256 << 20

# Rows of the control's matrices: about ten milliseconds on one core.
CONTROL_SIZE = 768

# The forward of one sequence of 2048 tokens and 16 heads is to take no longer than this where a 2048^3 float32 product
# runs at that rate; elsewhere in proportion.
TARGET_RATE, TARGET_SECONDS = 195e9, 0.15


class Host:
    """The engine "numpy" in float32 on the threads that this process may use. model: the processor's name."""

    engine, module, dtype, chunk_length = "numpy", np, np.dtype("f4"), CHUNK_LENGTH
    # What results are held against.
    oracle = "reference"

    def __init__(self, model):
        self._model = model

    def describe(self):
        """What a record calls this machine; records of other machines cannot be compared with it."""
        return {"name": self._model, "threads": thread_count()}

    def state(self):
        """What may disturb a measurement now: the processes that want to run, a minute's average."""
        return {"load": os.getloadavg()[0]}

    def bandwidth(self, size=FLUSH_BYTES, samples=5):
        """Bytes per second, read plus written, of a copy of `size` bytes by all threads."""
        threads = thread_count()
        source, target = np.ones(size, "u1"), np.empty(size, "u1")
        parts = list(zip(np.array_split(target, threads), np.array_split(source, threads)))
        with ThreadPoolExecutor(threads) as pool:
            copy = lambda: list(pool.map(lambda pair: np.copyto(*pair), parts))
            return 2 * size / median(self.measure({"copy": copy}, samples, cold=False)["copy"])

    def matrix_rate(self, size=2048, samples=5):
        """FLOP/s of a float32 matrix product of that size."""
        random = np.random.default_rng(0)
        a, b = (random.standard_normal((size, size), dtype="f4") for _ in range(2))
        return 2 * size**3 / median(self.measure({"product": lambda: a @ b}, samples, cold=False)["product"])

    def control(self):
        """A call that is always the same work: how long it takes tells how fast the machine is just now.

        On one thread: the BLAS's other threads would go on spinning into the call that is measured next.
        """
        x, blas = np.ones((CONTROL_SIZE, CONTROL_SIZE), "f4"), ThreadpoolController()

        def product():
            with blas.limit(limits=1):
                x @ x

        return product

    def measure(self, calls, samples, cold):
        """Seconds of every sample of each call, by the same names, the calls in turn.

        cold: caches hold nothing of the call's data.
        """
        flush = np.empty(FLUSH_BYTES if cold else 0, "u1")
        taken = {name: [] for name in calls}
        for call in calls.values():
            call()
        for _ in range(samples):
            for name, call in calls.items():
                flush.fill(0)
                start = time.perf_counter()
                call()
                taken[name].append(time.perf_counter() - start)
        return taken

    def synchronize(self):
        """Nothing is under way behind a call here."""

    def host_seconds(self, call):
        """None: here the host's time is the whole time."""

    def peak_bytes(self, call):
        """None: only device memory is counted."""

    def capture(self, call):
        raise InputError("graph: expected engine cuda, got numpy, which has no graphs to replay")

    def kernel_seconds(self, call, samples):
        """Empty: NumPy has no kernels to be timed one by one."""
        return {}

    def peers(self):
        """Empty: no other implementation is adapted to run here."""
        return {}
