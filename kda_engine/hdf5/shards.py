"""Outputs as one file per rank plus a main file of virtual datasets, for file systems where one writer is too slow.

OUTPUT.h5.shards-<id>/rank-0007.h5 holds rank 7's rows; OUTPUT.h5 maps them and lists every shard with its checksum,
because HDF5 reads a missing shard as fill values without a word. The reader of this package goes by that list and opens
the shards themselves; the virtual datasets are for other tools.
"""

import os
import secrets
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np

from ..errors import InputError
from . import types, virtual
from .atomic import AtomicFile, absolute, refusing
from .opening import digest, reading
from .tree import open_tree
from .trial import Trial

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
    return f"{absolute(path)}.shards-{secrets.token_hex(4)}"


def check_shard_folder(path):
    """Raise InputError when the folder of this output's shards cannot be made; nothing is left of the trial."""
    folder = shard_folder(path)
    with refusing(path):
        os.mkdir(folder)
    os.rmdir(folder)


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
        virtual.create(root, name, shape, np.dtype(dtypes[name]), sources)
    types.write_json(root, MANIFEST, [asdict(shard) for shard in shards])


def read_manifest(tree):
    """The `Shard`s that a main file lists, none where it has no list. Raises InputError."""
    listed = tree.dataset(MANIFEST)
    if listed is None:
        return []
    with reading(tree.path, f"/{MANIFEST}"):
        shards = [Shard(entry["file"], entry["sha256"], {name: (int(first), int(count))
                                                        for name, (first, count) in entry["rows"].items()})
                  for entry in types.read_json(listed)]
        for shard in shards:
            # A shard lies in a folder beside the main file.
            if shard.file.count("/") != 1 or ".." in shard.file.split("/") or "\0" in shard.file:
                raise ValueError(f"expected FOLDER/FILE, got {shard.file!r}")
    return shards


def sharded_rows(path, shards):
    """`ShardedRows` by dataset name, of all datasets of which some shard of the main file at `path` has rows.

    Raises InputError naming the first shard that is lost, changed or does not hold what the manifest says.
    """
    folder, parts = os.path.dirname(os.path.abspath(path)), {}
    for shard in shards:
        file = os.path.join(folder, shard.file)
        if not os.path.isfile(file):
            raise InputError(f"{path}: shard {shard.file}: expected a file, got nothing")
        if digest(file) != shard.sha256:
            raise InputError(f"{path}: shard {shard.file}: expected the checksum of the manifest, got another")
        names = [name for name, (_, count) in shard.rows.items() if count]
        with _opened(file, names) as rows:
            for name in names:
                parts.setdefault(name, []).append(Part(*shard.rows[name], file, rows[name].shape, rows[name].dtype))
    return {name: ShardedRows(name, sorted(of, key=lambda part: part.first)) for name, of in parts.items()}


@dataclass(frozen=True)
class Part:
    """A shard's rows of one dataset: the first one's number in the whole, how many, and what the shard holds."""

    first: int
    count: int
    file: str
    shape: tuple
    dtype: np.dtype | None


class ShardedRows:
    """One dataset whose rows lie in shards, as `types.Rows`. parts: `Part`s in the rows' order. Raises InputError."""

    def __init__(self, name, parts):
        self._name, self._parts, rows = name, parts, 0
        self.dtype, tail = parts[0].dtype, parts[0].shape[1:]
        for part in parts:
            if (part.first, part.shape, part.dtype) != (rows, (part.count,) + tail, self.dtype):
                raise InputError(f"{part.file}: /{name}: expected {self.dtype} {(part.count,) + tail} from row {rows} "
                                 f"on, got {part.dtype} {part.shape} from row {part.first} on")
            rows += part.count
        self.shape = (rows,) + tail

    def read(self, start, stop):
        """Rows [start, stop) as a new contiguous array."""
        values = np.empty((stop - start,) + self.shape[1:], self.dtype)
        for part in self._parts:
            begin, end = max(start, part.first), min(stop, part.first + part.count)
            if begin < end:
                with _opened(part.file, [self._name]) as rows:
                    values[begin - start : end - start] = rows[self._name].read(begin - part.first, end - part.first)
        return values


@contextmanager
def _opened(file, names):
    """A shard's `types.Rows` by dataset name."""
    with open_tree(file, ("output",), Trial(file, "results")) as tree:
        yield {name: types.Rows(tree.needed(name, may_be_virtual=False)) for name in names}


@contextmanager
def remove_replaced(path):
    """Removes, after the block has replaced the file at `path`, the shard folder that the old file used."""
    folders = _folders_of(path)
    yield
    for folder in folders:
        remove_shards(folder)


def _folders_of(path):
    try:
        with open_tree(path, ("output",), Trial(path, "results")) as tree:
            shards = read_manifest(tree)
    except InputError:
        return set()
    where, name = os.path.split(os.path.abspath(path))
    named = {shard.file.split("/")[0] for shard in shards}
    return {os.path.join(where, folder) for folder in named if folder.startswith(f"{name}.shards-")}
