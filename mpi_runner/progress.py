"""One line of progress on rank 0's terminal."""

import sys
import time

# Runs shorter than this show nothing.
QUIET_SECONDS = 2.0


class Progress:
    """Shows the phase that runs and the time since the start; silent on other ranks and where no terminal is."""

    def __init__(self, rank):
        self._shown = rank == 0 and sys.stderr.isatty()
        self._start = self._next = time.monotonic()
        self._next += QUIET_SECONDS
        self._phase, self._wrote = "", False

    def phase(self, name):
        self._phase = name

    def tick(self):
        now = time.monotonic()
        if self._shown and now >= self._next:
            self._next = now + 0.5
            self._wrote = True
            sys.stderr.write(f"\r{self._phase:<12}{now - self._start:8.1f} s")
            sys.stderr.flush()

    def done(self):
        """Clear the line."""
        if self._wrote:
            sys.stderr.write("\r" + " " * 24 + "\r")
            sys.stderr.flush()
