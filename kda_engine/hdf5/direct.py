"""Rows of a dataset read and written beside the HDF5 library: it takes one thread at a time, the system takes many.

HDF5 tells where a dataset's chunks lie in its file (`RowPlaces.of`); from there on rows are bytes at known places. The
checksum behind each chunk is verified and made as the library would (`checksum.fletcher32`).
"""

import os
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass

import numpy as np
from h5py import h5d, h5t, h5z

from ..errors import InputError
from .checksum import CHECKSUM_BYTES, fletcher32

_END = object()

# Seconds between two looks at `poll` while other threads read or write.
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class RowPlaces:
    """Where the rows (along the first axis) of a dataset lie in its file.

    rows: of the dataset. row_bytes: of one row. chunk_rows: rows of a chunk. offsets: int64 [chunks], the byte at which
    each chunk's data begin. checked: whether a checksum follows each chunk's data. A last chunk is as long as the others.
    """

    rows: int
    row_bytes: int
    chunk_rows: int
    offsets: np.ndarray
    checked: bool

    @property
    def chunk_bytes(self):
        """Bytes of a chunk's data."""
        return self.chunk_rows * self.row_bytes

    @classmethod
    def of(cls, dataset):
        """The places of an h5py.Dataset's rows, or None where the library has to read it: `obstacle` says why."""
        if obstacle(dataset) is not None:
            return None
        row_bytes = dataset.id.get_type().get_size() * int(np.prod(dataset.shape[1:]))
        if dataset.chunks is None:
            return cls(len(dataset), row_bytes, len(dataset), np.array([dataset.id.get_offset()]), False)
        offsets = np.full(-(-len(dataset) // dataset.chunks[0]), -1, np.int64)

        def note(chunk):
            # A filter that was left out for a chunk leaves no checksum: such a chunk counts as missing.
            if chunk.filter_mask == 0:
                offsets[chunk.chunk_offset[0] // dataset.chunks[0]] = chunk.byte_offset

        dataset.id.chunk_iter(note)
        if (offsets < 0).any():
            return None
        return cls(len(dataset), row_bytes, dataset.chunks[0], offsets, dataset.fletcher32)


def obstacle(dataset):
    """Why the rows of an h5py.Dataset cannot be read directly, as text; None where they can, if all chunks are there."""
    properties = dataset.id.get_create_plist()
    filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
    if dataset.id.get_type().get_order() == h5t.ORDER_BE:
        return "big-endian values"
    if not dataset.size:
        return "no values"
    if dataset.file.userblock_size:
        return "a user block in front of the file"
    if properties.get_layout() == h5d.CONTIGUOUS:
        # None for values in an external file, and for a dataset that nothing was written to.
        return "values outside the file" if dataset.id.get_offset() is None else None
    if properties.get_layout() != h5d.CHUNKED:
        return "a compact or virtual layout"
    if dataset.chunks[1:] != dataset.shape[1:]:
        return "chunks that split rows"
    if filters not in ([], [h5z.FILTER_FLETCHER32]):
        return "compressed values"
    return None


def read_rows(descriptor, places, start, stop, where, pool, poll=lambda: None):
    """Rows [start, stop) as a new array of bytes [stop - start, row_bytes].

    descriptor: of the open file. pool: a ThreadPoolExecutor. poll: called now and then from this thread; may raise.
    where: for messages. Raises InputError for a checksum that does not match and for a file that is too short.
    """
    out = np.empty((stop - start, places.row_bytes), np.uint8)

    def read(chunk):
        first = chunk * places.chunk_rows
        low, high = max(start, first), min(stop, first + places.chunk_rows)
        # A whole chunk goes to its place, the checksum aside; of any other a copy is cut out.
        whole = high - low == places.chunk_rows
        data = out[low - start : high - start] if whole else np.empty((places.chunk_rows, places.row_bytes), np.uint8)
        tail = np.empty(CHECKSUM_BYTES if places.checked else 0, np.uint8)
        _read_fully(descriptor, [data.reshape(-1), tail], int(places.offsets[chunk]), where)
        if places.checked and fletcher32(data) != int.from_bytes(tail.tobytes(), "little"):
            raise InputError(f"{where}: expected data that match their checksum, got a mismatch in rows "
                             f"{first} to {min(first + places.chunk_rows, places.rows)}")
        if not whole:
            out[low - start : high - start] = data[low - first : high - first]

    if stop > start:
        run_all(pool, read, range(start // places.chunk_rows, -(-stop // places.chunk_rows)), poll)
    return out


def write_chunk(descriptor, places, chunk, rows):
    """Write chunk number `chunk`: rows, contiguous, of at most chunk_rows rows; zeros fill a chunk that is not full.

    Raises OSError.
    """
    data = rows.reshape(-1).view(np.uint8)
    if len(data) < places.chunk_bytes:
        data = np.concatenate([data, np.zeros(places.chunk_bytes - len(data), np.uint8)])
    tail = fletcher32(data).to_bytes(CHECKSUM_BYTES, "little") if places.checked else b""
    views, offset = [memoryview(data), memoryview(tail)], int(places.offsets[chunk])
    while views:
        done = os.pwritev(descriptor, views, offset)
        offset += done
        views = _behind(views, done)


# Items that wait on the pool at a time: enough for its threads, few enough in memory.
_AHEAD = 8


def run_all(pool, work, items, poll=lambda: None):
    """work(item) of all items on the pool; `poll` between looks at them. Raises the first error, after all have stopped.

    items: anything iterable; the next one is asked for when there is room for it.
    """
    waiting, items = set(), iter(items)
    try:
        while True:
            while len(waiting) < _AHEAD:
                item = next(items, _END)
                if item is _END:
                    break
                waiting.add(pool.submit(work, item))
            if not waiting:
                return
            done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
            for future in done:
                future.result()
            poll()
    except BaseException:
        for future in waiting:
            future.cancel()
        wait(waiting)
        raise


def _read_fully(descriptor, buffers, offset, where):
    views = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while views:
        try:
            done = os.preadv(descriptor, views, offset)
        except OSError as error:
            raise InputError(f"{where}: expected readable data, got: {error.strerror}") from None
        if not done:
            raise InputError(f"{where}: expected data up to byte {offset + sum(map(len, views))}, got a file that is cut "
                             f"short at byte {offset}")
        offset += done
        views = _behind(views, done)


def _behind(views, done):
    """What is left of the buffers behind the first `done` bytes."""
    left = []
    for view in views:
        taken = min(done, len(view))
        done -= taken
        if taken < len(view):
            left.append(view[taken:])
    return left
