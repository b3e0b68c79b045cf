"""One rank's way to write its rows into an output file that another process is making."""

import os
from concurrent.futures import ThreadPoolExecutor

from .direct import run_all, write_chunk


class ChunkWriter:
    """Writes whole chunks into the temporary file of a `ResultWriter`, beside the HDF5 library.

    temporary, places: of `ResultWriter.shared`, on any rank that sees the file. threads: that write side by side. No two
    writers may write the same chunk. Context manager. Every method raises OSError when the disk is full or fails; whoever
    made the file must then leave it unfinished.
    """

    def __init__(self, temporary, places, threads=1):
        self._descriptor, self._places = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC), places
        self._pool = ThreadPoolExecutor(threads)

    def write(self, name, blocks, poll=lambda: None):
        """Write chunks of a dataset. blocks: (number of the chunk, its rows as a NumPy array of the dataset's type);
        the array may be changed after the call. poll: called now and then; may raise."""
        places = self._places[name]
        run_all(self._pool, lambda block: write_chunk(self._descriptor, places, *block), blocks, poll)

    def sync(self):
        """Make everything that was written durable."""
        os.fsync(self._descriptor)

    def close(self):
        """Close the file; nothing is made durable."""
        self._pool.shutdown()
        os.close(self._descriptor)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
