"""Messages by which ranks agree, and the one way to wait: with a time limit. Values here are small; data has transports.

Every wait is a loop of Test calls: it costs what the blocking call costs, stops when the job is told to stop, and
gives up after `timeout` seconds instead of hanging.
"""

import os
import pickle
import time

import numpy as np

from ..mpi import MPI
from .volume import gathered

# Seconds that a wait keeps looking before it sleeps between two looks: MPI libraries move data only while they are
# called, a piece at a time, and any sleep is longer than a piece takes.
EAGER_SECONDS = 0.02


class ExchangeTimeout(RuntimeError):
    """A transfer did not finish within the time limit."""


class Control:
    """Control messages over one communicator. sent: bytes of them that this rank handed to others.

    poll: called while this rank waits; it may raise to stop the job. timeout: the longest wait, in seconds, counted
    from the last sign of life of all ranks; last_sign() says when that was, on the monotonic clock.
    """

    def __init__(self, comm, poll=lambda: None, timeout=600.0, last_sign=lambda: 0.0):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.poll, self.timeout, self._last_sign = poll, timeout, last_sign
        self.sent = 0
        self._under_way, self._nodes = [], None

    def watch(self, request):
        """Let `progress` move this request on until it is done."""
        self._under_way.append(request)

    def progress(self):
        """Let transfers that are under way move on; MPI libraries move data only while they are called."""
        if self._under_way:
            self._under_way = [request for request in self._under_way if not request.Test()]

    def wait(self, request, what):
        """Until the request is done. Raises ExchangeTimeout, or whatever `poll` raises."""
        self.wait_until(request.Test, what)

    def wait_until(self, done, what):
        """Until done() is true; it is called again and again. Raises as `wait` does."""
        begin, pause = time.monotonic(), 0.0
        while not done():
            self.poll()
            if time.monotonic() > max(begin, self._last_sign()) + self.timeout:
                raise ExchangeTimeout(f"{what}: not finished on rank {self.rank}, and some rank has given no sign of "
                                      f"life for {self.timeout:g} s")
            if time.monotonic() < begin + EAGER_SECONDS:
                # To others that wait for this core, if there are any.
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(pause + 2e-6, 1e-3)

    def largest(self, number, what):
        """The largest of one integer a rank, on all ranks."""
        mine, top = np.array([number], "i8"), np.empty(1, "i8")
        self.wait(self.comm.Iallreduce(mine, top, op=MPI.MAX), what)
        return int(top[0])

    def nodes(self):
        """The name of every rank's machine; collective the first time."""
        if self._nodes is None:
            self._nodes = tuple(self.collect(MPI.Get_processor_name(), "naming the nodes"))
        return self._nodes

    def collect(self, value, what):
        """One small Python object from every rank, as a list on all ranks."""
        payload = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = np.empty(self.size, "i8")
        self.wait(self.comm.Iallgather(np.array([len(payload)], "i8"), lengths), what)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        received = np.empty(int(starts[-1]), np.uint8)
        self.wait(self.comm.Iallgatherv([payload, MPI.BYTE],
                                        [received, lengths.tolist(), starts[:-1].tolist(), MPI.BYTE]), what)
        self.sent += gathered(8 + payload.nbytes, self.size)
        return [pickle.loads(received[a:b].tobytes()) for a, b in zip(starts, starts[1:])]
