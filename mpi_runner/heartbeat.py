"""Signs of life between ranks, so that waiting for one that works is told from waiting for one that is stuck.

Every rank joins one non-blocking barrier after the other whenever it is polled. A barrier that completes proves that
all ranks were polled since the one before; where one rank is stuck, no more of them complete anywhere.
"""

import time


class Heartbeat:
    """seen: when the last barrier was completed, on the monotonic clock. A communicator of its own is needed."""

    def __init__(self, comm):
        self._comm, self._request, self._joined, self._ending = comm, None, 0, False
        self.seen = time.monotonic()

    def beat(self, period):
        """Join or look at the current barrier; a new one `period` seconds after the last at the earliest."""
        if self._request is None:
            if not self._ending and time.monotonic() - self.seen >= period:
                self._join()
        elif self._request.Test():
            self._request, self.seen = None, time.monotonic()

    def finish(self, largest):
        """Complete what some ranks have joined and others not; collective. largest(n): the largest of all ranks' n.

        MPI may not be finalised while a barrier is open.
        """
        # From here on none is joined unasked: the ranks are agreeing on how many there are.
        self._ending = True
        most = largest(self._joined)
        while self._request is not None or self._joined < most:
            if self._request is None:
                self._join()
            self._request.Wait()
            self._request = None

    def _join(self):
        self._request = self._comm.Ibarrier()
        self._joined += 1
