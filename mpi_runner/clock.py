"""Wall time by phase."""

import time
from contextlib import contextmanager


class Clock:
    """seconds: phase -> seconds spent in it so far. entered: called with each phase's name as it begins."""

    def __init__(self, entered=lambda phase: None):
        self.seconds = {}
        self._entered = entered
        self._running = None

    @contextmanager
    def __call__(self, phase):
        self._entered(phase)
        self._running = (phase, time.perf_counter())
        try:
            yield
        finally:
            self.seconds = self.so_far()
            self._running = None

    def so_far(self):
        """seconds, with the phase that is running now."""
        if self._running is None:
            return dict(self.seconds)
        phase, start = self._running
        return {**self.seconds, phase: self.seconds.get(phase, 0.0) + time.perf_counter() - start}
