"""Checked, non-blocking MPI transfers of NumPy arrays, with a time limit. No mathematics.

Every wait is a loop of Test calls: it costs what the blocking call costs, stops when the job is told to stop, and
gives up after `timeout` seconds instead of hanging.
"""

import os
import pickle
import time
from math import gcd

import numpy as np
from mpi4py import MPI

# Seconds that a wait keeps looking before it sleeps between two looks: MPI libraries move data only while they are
# called, a piece at a time, and any sleep is longer than a piece takes.
EAGER_SECONDS = 0.02

# Bytes of one message when large arrays are moved slab by slab.
SLAB_BYTES = 32 << 20

_TYPES = {np.dtype("u1"): MPI.BYTE, np.dtype("i8"): MPI.INT64_T, np.dtype("f4"): MPI.FLOAT, np.dtype("f8"): MPI.DOUBLE}


class ExchangeTimeout(RuntimeError):
    """A transfer did not finish within the time limit."""


class Exchange:
    """Transfers over one communicator. sent: bytes this rank handed to others, counted as the algorithm needs them.

    timeout: the longest wait, in seconds, counted from the last sign of life of all ranks; last_sign() says when that
    was, on the monotonic clock.
    """

    def __init__(self, comm, poll=lambda: None, timeout=600.0, last_sign=lambda: 0.0):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.poll, self.timeout, self._last_sign = poll, timeout, last_sign
        self.sent = 0
        self._under_way = None

    def progress(self):
        """Let a gather that is under way move on; MPI libraries move data only while they are called."""
        if self._under_way is not None:
            self._under_way.Test()

    def wait(self, request, what):
        """Until the request is done. Raises ExchangeTimeout, or whatever `poll` raises."""
        begin, pause = time.monotonic(), 0.0
        while not request.Test():
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

    def start_gather(self, mine, lengths, what):
        """Begin an allgather of 1-D arrays, lengths[r] elements from rank r; returns a `Gather` to wait on.

        mine: contiguous [lengths[rank]] of the type all ranks use.
        """
        mine = np.ascontiguousarray(mine)
        if mine.shape != (lengths[self.rank],):
            raise ValueError(f"{what}: expected {lengths[self.rank]} elements from rank {self.rank}, got {mine.shape}")
        # Counted in rows of a contiguous type, so that counts stay within 32 bits.
        row = gcd(*lengths) or 1
        unit = _bits(mine)[1].Create_contiguous(row).Commit()
        received = np.empty(sum(lengths), mine.dtype)
        counts = [n // row for n in lengths]
        starts = np.concatenate([[0], np.cumsum(counts)])[:-1].tolist()
        request = self.comm.Iallgatherv([_bits(mine)[0], counts[self.rank], unit],
                                        [_bits(received)[0], counts, starts, unit])
        self.sent += mine.nbytes * (self.size - 1)
        self._under_way = request
        return Gather(self, request, unit, mine, received, lengths, what)

    def sum(self, x, what):
        """The sum of a float64 array over all ranks, on all ranks."""
        x = np.ascontiguousarray(x, dtype="f8")
        total = np.empty_like(x)
        self.wait(self.comm.Iallreduce(x, total, op=MPI.SUM), what)
        self.sent += x.nbytes if self.size > 1 else 0
        return total

    def largest(self, number, what):
        """The largest of one integer a rank, on all ranks."""
        mine, top = np.array([number], "i8"), np.empty(1, "i8")
        self.wait(self.comm.Iallreduce(mine, top, op=MPI.MAX), what)
        return int(top[0])

    def collect(self, value, what):
        """One small Python object from every rank, as a list on all ranks."""
        payload = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = np.concatenate(self.start_gather(np.array([len(payload)]), [1] * self.size, what).wait())
        parts = self.start_gather(payload, lengths.tolist(), what).wait()
        return [pickle.loads(part.tobytes()) for part in parts]

    def start_send(self, x, to):
        """Begin to send an array in slabs to one rank; returns the requests. x must stay as it is
        until they are done."""
        self.sent += x.nbytes
        return [self.comm.Isend([bits, kind], dest=to) for bits, kind in self._slabs(x)]

    def send(self, x, to, what):
        """Send an array in slabs to one rank, one slab at a time."""
        self.sent += x.nbytes
        for bits, kind in self._slabs(x):
            self.wait(self.comm.Isend([bits, kind], dest=to), what)

    def receive(self, shape, dtype, source, what):
        """An array of that shape and type that `source` sends by `send`."""
        x = np.empty(shape, dtype)
        for bits, kind in self._slabs(x):
            self.wait(self.comm.Irecv([bits, kind], source=source), what)
        return x

    @staticmethod
    def _slabs(x):
        if not x.flags.c_contiguous:
            raise ValueError(f"expected a contiguous array, got strides {x.strides} for shape {x.shape}")
        bits, kind = _bits(x.reshape(-1))
        step = SLAB_BYTES // bits.itemsize
        for start in range(0, len(bits), step):
            yield bits[start : start + step], kind


class Gather:
    """An allgather under way. Keeps its buffers alive until it is done."""

    def __init__(self, exchange, request, unit, mine, received, lengths, what):
        self._exchange, self._request, self._unit, self._what = exchange, request, unit, what
        self._mine, self._received, self._lengths = mine, received, lengths

    def wait(self):
        """The contributions of all ranks, a list of 1-D arrays."""
        self._exchange.wait(self._request, self._what)
        self._exchange._under_way = None
        self._unit.Free()
        return np.split(self._received, np.cumsum(self._lengths)[:-1])


def _bits(x):
    """x as a type that MPI knows (16-bit floats travel as their bits), and that MPI type."""
    if x.dtype.itemsize == 2:
        return x.view(np.uint16), MPI.UINT16_T
    if x.dtype not in _TYPES:
        raise ValueError(f"expected one of {', '.join(map(str, _TYPES))} or a 16-bit float, got {x.dtype}")
    return x, _TYPES[x.dtype]
