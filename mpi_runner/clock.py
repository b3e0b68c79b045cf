"""Wall time and sent bytes by phase."""

import time
from contextlib import contextmanager


class Clock:
    """entered: called with each phase's name as it begins. sent: gives the bytes sent since some start."""

    def __init__(self, entered=lambda phase: None, sent=lambda: 0):
        self._spent = {}
        self._entered, self._sent = entered, sent
        self._running = None

    @contextmanager
    def __call__(self, phase):
        self._entered(phase)
        self._running = (phase, time.perf_counter(), self._sent())
        try:
            yield
        finally:
            self._spent = self.so_far()
            self._running = None

    def so_far(self):
        """phase -> (seconds spent, bytes sent) in it, the phase that is running now with them."""
        if self._running is None:
            return dict(self._spent)
        phase, start, sent = self._running
        seconds, count = self._spent.get(phase, (0.0, 0))
        return {**self._spent, phase: (seconds + time.perf_counter() - start, count + self._sent() - sent)}
