"""Transport "mpi": NumPy arrays through MPI and host memory. Checked, non-blocking, with a time limit."""

from math import gcd

import numpy as np

from ...mpi import MPI
from ..staged import StagedEngine
from ..volume import gathered, summed

# Bytes of one message when large arrays are moved slab by slab.
SLAB_BYTES = 32 << 20

_TYPES = {np.dtype("u1"): MPI.BYTE, np.dtype("i8"): MPI.INT64_T, np.dtype("f4"): MPI.FLOAT, np.dtype("f8"): MPI.DOUBLE}


class HostTransport:
    """control: the `Control` whose ranks exchange and whose wait is used.

    Buffers are kept under their names and made anew only when they have to grow, because every fresh page of memory
    costs as much time as a small message. What a call hands out in a buffer stays as it is until the next call that
    uses the same name.
    """

    name = "mpi"

    def __init__(self, control):
        self.control, self.rank, self.size = control, control.rank, control.size
        self.sent = 0
        self._buffers, self._engine = {}, None

    def stage(self, engine):
        """The engine with its states in host memory; the same one again for the same engine."""
        if self._engine is None or self._engine.engine is not engine:
            self._engine = StagedEngine(engine, self.buffer)
        return self._engine

    def buffer(self, name, shape, dtype, allocate=lambda nbytes: np.empty(nbytes, np.uint8)):
        """An array [*shape] in the buffer of that name; its contents are whatever was there.

        allocate: gives so many bytes as a NumPy array, where others than ordinary memory are wanted.
        """
        dtype = np.dtype(dtype)
        count = int(np.prod(shape))
        kept = self._buffers.get(name)
        if kept is None or kept.nbytes < count * dtype.itemsize:
            kept = self._buffers[name] = allocate(count * dtype.itemsize)
        return kept[: count * dtype.itemsize].view(dtype).reshape(shape)

    def start_gather(self, mine, lengths, what):
        """Begin an allgather of 1-D arrays, lengths[r] elements from rank r; returns a `Gather` to wait on.

        mine: contiguous [lengths[rank]] of the type all ranks use, unchanged until then. what: names the gather in
        messages, and its buffer.
        """
        if mine.shape != (lengths[self.rank],) or not mine.flags.c_contiguous:
            raise ValueError(f"{what}: expected {lengths[self.rank]} contiguous elements from rank {self.rank}, got "
                             f"{mine.shape} with strides {mine.strides}")
        # Counted in rows of a contiguous type, so that counts stay within 32 bits.
        row = gcd(*lengths) or 1
        unit = _bits(mine)[1].Create_contiguous(row).Commit()
        received = self.buffer(what, (sum(lengths),), mine.dtype)
        counts = [n // row for n in lengths]
        starts = np.concatenate([[0], np.cumsum(counts)])[:-1].tolist()
        request = self.control.comm.Iallgatherv([_bits(mine)[0], counts[self.rank], unit],
                                                [_bits(received)[0], counts, starts, unit])
        self.sent += gathered(mine.nbytes, self.size)
        self.control.watch(request)
        return Gather(self.control, request, unit, mine, received, lengths, what)

    def gather(self, mine, lengths, what):
        """All ranks' contributions, a list of 1-D arrays."""
        return self.start_gather(mine, lengths, what).wait()

    def sum(self, x, what):
        """The sum of a float64 array over all ranks, on all ranks; a new array."""
        x = np.ascontiguousarray(x, dtype="f8")
        total = np.empty_like(x)
        self.control.wait(self.control.comm.Iallreduce(x, total, op=MPI.SUM), what)
        self.sent += summed(x.nbytes, self.size)
        return total

    def start_send(self, x, to):
        """Begin to send an array in slabs to one rank; returns the requests. x stays as it is until they are done."""
        self.sent += x.nbytes
        requests = [self.control.comm.Isend([bits, kind], dest=to) for bits, kind in _slabs(x)]
        for request in requests:
            self.control.watch(request)
        return requests

    def start_receive(self, x, source):
        """Begin to receive into x what `source` sends of that size; returns the requests."""
        requests = [self.control.comm.Irecv([bits, kind], source=source) for bits, kind in _slabs(x)]
        for request in requests:
            self.control.watch(request)
        return requests

    def wait(self, requests, what):
        """Until all of them are done."""
        for request in requests:
            self.control.wait(request, what)

    def send(self, x, to, what):
        """Send an array in slabs to one rank, one slab at a time."""
        self.sent += x.nbytes
        for bits, kind in _slabs(x):
            self.control.wait(self.control.comm.Isend([bits, kind], dest=to), what)

    def receive(self, shape, dtype, source, what):
        """A new array of that shape and type that `source` sends by `send`."""
        x = np.empty(shape, dtype)
        for bits, kind in _slabs(x):
            self.control.wait(self.control.comm.Irecv([bits, kind], source=source), what)
        return x


class Gather:
    """An allgather under way. Keeps its arrays alive until it is done."""

    def __init__(self, control, request, unit, mine, received, lengths, what):
        self._control, self._request, self._unit, self._what = control, request, unit, what
        self._mine, self._received, self._lengths = mine, received, lengths

    @property
    def requests(self):
        """What is to be done before there are contributions."""
        return [self._request]

    @property
    def contributions(self):
        """Those of all ranks, a list of 1-D arrays in the transport's buffer."""
        return np.split(self._received, np.cumsum(self._lengths)[:-1])

    def wait(self):
        """The contributions, once they are there."""
        self._control.wait(self._request, self._what)
        self._unit.Free()
        return self.contributions


def _slabs(x):
    if not x.flags.c_contiguous:
        raise ValueError(f"expected a contiguous array, got strides {x.strides} for shape {x.shape}")
    bits, kind = _bits(x.reshape(-1))
    step = SLAB_BYTES // bits.itemsize
    for start in range(0, len(bits), step):
        yield bits[start : start + step], kind


def _bits(x):
    """x as a type that MPI knows (16-bit floats travel as their bits), and that MPI type."""
    if x.dtype.itemsize == 2:
        return x.view(np.uint16), MPI.UINT16_T
    if x.dtype not in _TYPES:
        raise ValueError(f"expected one of {', '.join(map(str, _TYPES))} or a 16-bit float, got {x.dtype}")
    return x, _TYPES[x.dtype]
