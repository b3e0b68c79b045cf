"""Wall time by phase."""

import time
from contextlib import contextmanager


class Clock:
    """seconds: phase -> seconds spent in it so far. entered: called with each phase's name as it begins."""

    def __init__(self, entered=lambda phase: None):
        self.seconds = {}
        self._entered = entered

    @contextmanager
    def __call__(self, phase):
        self._entered(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
