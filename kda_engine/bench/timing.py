"""How device work is timed: events around the whole call, warm clocks, the L2 cache cold or not, sides interleaved."""

import statistics
import time
from dataclasses import dataclass

import cupy

# Written between samples: more than the L2 cache of any device in use.
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Timing:
    """Milliseconds: median, and the distance between the quartiles, of so many samples; raw: all of them in order."""

    median: float
    spread: float
    samples: int
    raw: list


def measure(calls, samples=30, warm_up=0.025, cold=True):
    """The Timing of each call, by the same names. calls: name -> function without arguments.

    Every call is warmed up for at least `warm_up` seconds; then each round takes one sample of every call in turn.
    cold: the L2 cache holds nothing of the call's data. Without it nothing keeps the device busy before a call, so one
    that is shorter on the device than on the host shows the host's time.
    """
    for call in calls.values():
        _warm_up(call, warm_up)
    flush = cupy.empty(FLUSH_BYTES if cold else 0, "u1")
    events = {name: [] for name in calls}
    for _ in range(samples):
        for name, call in calls.items():
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            # The fill also gives the host time to be ahead of the device when the call's first kernel is due.
            flush.fill(0)
            start.record()
            call()
            stop.record()
            events[name].append((start, stop))
    cupy.cuda.Device().synchronize()
    return {name: _timing([cupy.cuda.get_elapsed_time(*pair) for pair in pairs]) for name, pairs in events.items()}


def host_seconds(call, samples=200):
    """The median time that one call keeps the host busy, in seconds; the device is idle before each."""
    taken = []
    for _ in range(samples):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def copy_bandwidth(size=4 << 30):
    """Bytes per second, read plus written, of a device-to-device copy of `size` bytes."""
    source, target = cupy.ones(size, "u1"), cupy.empty(size, "u1")
    timing = measure({"copy": lambda: target.data.copy_from_device(source.data, size)}, samples=10)["copy"]
    return 2 * size / (timing.median * 1e-3)


def _warm_up(call, seconds):
    end = time.perf_counter() + seconds
    while True:
        call()
        cupy.cuda.Device().synchronize()
        if time.perf_counter() > end:
            return


def _timing(milliseconds):
    first, middle, last = statistics.quantiles(milliseconds, n=4)
    return Timing(middle, last - first, len(milliseconds), list(milliseconds))
