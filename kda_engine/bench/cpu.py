"""The NumPy engine's speed beside the rate of the machine's own matrix product."""

import statistics
import time

import numpy as np

from .. import api, cases
from ..compare import compare
from ..engines.host import thread_count
from ..options import Options

# Rate of a 2048^3 float32 product on the machine that the target was set on, and the target there: 1 x 2048 x 16.
TARGET_RATE, TARGET_SECONDS = 195e9, 0.15


def matrix_rate(size=2048, samples=5):
    """FLOP/s of a float32 matrix product of that size, median."""
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((size, size)).astype("f4") for _ in range(2))
    return 2 * size**3 / _median(lambda: a @ b, samples)


def measure(tokens=2048, heads=16, samples=5, engine="numpy"):
    """A dict of what was measured: seconds of forward and of forward + backward, error, matrix rate, scaled target.

    The forward is checked against the float64 recurrence on its first 128 tokens before anything is timed;
    "seconds" are None when the check fails.
    """
    case = cases.make("strong", tokens=tokens, heads=heads, K=128, V=128)
    given = (case.q, case.k, case.v, case.g, case.beta)
    more = {"A_log": case.A_log, "dt_bias": case.dt_bias, "options": Options()}
    few = min(tokens, 128)
    first = lambda engine: api.forward(*(x[:few] for x in given), **more, engine=engine, save=False).out
    error = compare(first(engine), first("reference"))
    result = {"tokens": tokens, "heads": heads, "threads": thread_count(), "error": error, "forward_seconds": None,
              "forward_backward_seconds": None, "matrix_rate": matrix_rate()}
    result["target_seconds"] = TARGET_SECONDS * TARGET_RATE / result["matrix_rate"]
    if error <= 2e-5:
        result["forward_seconds"] = _median(lambda: api.forward(*given, **more, engine=engine, save=False), samples)
        result["forward_backward_seconds"] = _median(
            lambda: api.backward(api.forward(*given, **more, engine=engine), case.d_out), samples)
    return result


def _median(call, samples):
    call()
    taken = []
    for _ in range(samples):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
