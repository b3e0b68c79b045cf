"""Signals to a rank outside of its session: before it they end the process in order, behind it they come too late."""

import os
import signal
import sys
from contextlib import contextmanager

from .exit_codes import STOPPED
from .launched import launched, launched_rank

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@contextmanager
def ordered_signals():
    """Inside, a signal ends a rank with code 75 until a session watches for signals itself; afterwards none has an effect:
    the work is done, and its code stands. Of a process without a launcher nothing is changed.
    """
    if not launched():
        yield
        return
    for number in SIGNALS:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _stop(number, frame):
    sys.stderr.write(f"kda-engine: rank {launched_rank()}: stopped by {signal.Signals(number).name}\n")
    sys.stderr.flush()
    os._exit(STOPPED)
