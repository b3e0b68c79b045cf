"""How many threads this process may use, and how many of them the BLAS takes."""

import os
import threading
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController


def threads_asked_for():
    """OMP_NUM_THREADS as a number, None where it is not set to one."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else None


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
