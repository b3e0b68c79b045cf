"""Outputs as one file per rank plus a main file of virtual datasets, for file systems where one writer is too slow.

OUTPUT.h5.shards-<id>/rank-0007.h5 holds rank 7's rows; OUTPUT.h5 maps them and lists every shard with its checksum,
because HDF5 reads a missing shard as fill values without a word.
"""

import os
import secrets
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import h5py
import numpy as np

from ..errors import InputError
from . import types
from .atomic import AtomicFile
from .opening import digest

MANIFEST = "shards/manifest"


@dataclass(frozen=True)
class Shard:
    """One finished shard: its path relative to the main file, its checksum, its rows.

    rows: by dataset name (first row in the whole, number of rows).
    """

    file: str
    sha256: str
    rows: dict


def shard_folder(path):
    """A new name for the folder of an output's shards; choose it once and hand it to all ranks."""
    return f"{os.path.abspath(path)}.shards-{secrets.token_hex(4)}"


class ShardWriter:
    """One rank's shard in `folder` (made when missing).

    Context manager: leaving it without `finish` removes the shard. Raises OSError when the disk is full or fails.
    """

    def __init__(self, folder, rank):
        os.makedirs(folder, exist_ok=True)
        self._file = AtomicFile(os.path.join(folder, f"rank-{rank:04d}.h5"), "output")
        self._datasets, self._rows = {}, {}

    def create(self, name, first, shape, dtype):
        """A dataset for this rank's rows: `shape[0]` rows that start at row `first` of the whole dataset."""
        with self._file.writing():
            self._datasets[name] = types.create(self._file.root, name, shape, dtype)
        self._rows[name] = (int(first), int(shape[0]))

    def write(self, name, start, rows):
        """Put NumPy `rows` at rows [start, start + len(rows)) of this shard's dataset."""
        with self._file.writing():
            types.write_rows(self._datasets[name], start, rows)

    def finish(self):
        """Close, make durable, and return the `Shard` for the main file."""
        self._file.commit()
        folder, name = os.path.split(self._file.path)
        return Shard(f"{os.path.basename(folder)}/{name}", digest(self._file.path), self._rows)

    def abandon(self):
        """Remove the temporary file; harmless when finished."""
        self._file.abandon()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.abandon()


def remove_shards(folder):
    """Remove an unfinished output's shards; one caller, after every rank's writer is closed."""
    shutil.rmtree(folder, ignore_errors=True)


def link(root, shards, shapes, dtypes):
    """Virtual datasets over `shards` in an open main file, and the manifest that readers verify."""
    for name, shape in shapes.items():
        sources = [(shard.file, name, *shard.rows[name]) for shard in shards if shard.rows.get(name, (0, 0))[1]]
        if not sources:
            types.create(root, name, shape, dtypes[name])
            continue
        types.create_virtual(root, name, shape, np.dtype(dtypes[name]), sources)
    types.write_json(root, MANIFEST, [asdict(shard) for shard in shards])


def verify(path, manifest):
    """Check that every shard is there and unchanged. Raises InputError naming the first that is not."""
    folder = os.path.dirname(os.path.abspath(path))
    for entry in manifest:
        file = os.path.join(folder, entry["file"])
        if not os.path.isfile(file):
            raise InputError(f"{path}: shard {entry['file']}: expected a file, got nothing")
        if digest(file) != entry["sha256"]:
            raise InputError(f"{path}: shard {entry['file']}: expected the checksum of the manifest, got another")


@contextmanager
def remove_replaced(path):
    """Removes, after the block has replaced the file at `path`, the shard folder that the old file used."""
    folders = _folders_of(path)
    yield
    for folder in folders:
        remove_shards(folder)


def _folders_of(path):
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            manifest = types.read_json(file, MANIFEST)
    except (OSError, KeyError, TypeError, ValueError):
        return set()
    where, name = os.path.split(os.path.abspath(path))
    named = {entry["file"].split("/")[0] for entry in manifest}
    return {os.path.join(where, folder) for folder in named if folder.startswith(f"{name}.shards-")}
