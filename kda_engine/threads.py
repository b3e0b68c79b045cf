"""How many threads this process may use, and how many of them the BLAS takes."""

import os
import re
import threading
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController

# No machine has more cores; a larger number is a slip, and may be none that a BLAS takes.
MOST_THREADS = 4096


def threads_asked_for():
    """OMP_NUM_THREADS as a number, at most MOST_THREADS; None where it is not set to one above 0.

    As OpenMP reads it: blanks around it are allowed, and of a list the first number counts.
    """
    given = re.fullmatch(r"\s*0*([1-9][0-9]*)\s*(,.*)?", os.environ.get("OMP_NUM_THREADS", ""), re.ASCII | re.DOTALL)
    if given is None:
        return None
    return min(int(given[1][:9]), MOST_THREADS)


def thread_count():
    """Threads this process may use: OMP_NUM_THREADS where set, else the cores it may run on."""
    return threads_asked_for() or len(os.sched_getaffinity(0))


@cache
def _controller():
    # Looking for the process's BLAS libraries takes milliseconds; NumPy's is there from the start.
    return ThreadpoolController()


# Held while a call computes with a limit of its own: the BLAS's limit is one for the whole process, and of two calls that
# overlap one would put back the other's limit, for ever.
_limited = threading.Lock()


@contextmanager
def blas_limit(threads):
    """At most so many threads of the BLAS. Callers on other threads wait until the one before them is done."""
    with _limited, _controller().limit(limits=threads, user_api="blas"):
        yield


def _renew():
    # In a forked child the thread that held the lock does not exist.
    global _limited
    _limited = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
