"""Result files: a writer that takes slabs of rows, and a strict reader of outputs and goldens."""

import json
import os

import numpy as np

from ..errors import InputError
from . import schema, types
from .atomic import AtomicFile
from .direct import RowPlaces
from .opening import open_file, reading
from .shards import MANIFEST, link, remove_replaced, verify


class ResultWriter:
    """One output file in the making; nothing appears under `path` before `finish`.

    kind: "output" or "bench". Context manager: leaving it without `finish` removes everything written so far.
    Raises InputError when `path` exists and not `force`. Every method raises OSError when the disk is full or fails,
    after removing the temporary file.
    """

    def __init__(self, path, kind="output", force=False):
        self._file = AtomicFile(path, kind, force)
        self._datasets = {}

    @property
    def path(self):
        """The final, absolute path."""
        return self._file.path

    def create(self, name, shape, dtype, early=False):
        """A dataset to be filled by `write`; names such as "outputs/out", "grads/dq", "boundary/M".

        early: it may also be filled by `ChunkWriter`, from any process.
        """
        with self._file.writing():
            self._datasets[name] = types.create(self._file.root, name, shape, dtype, early=early)

    def shared(self):
        """(name of the temporary file, {name: `RowPlaces`} of all datasets with rows): what a `ChunkWriter` needs."""
        self._file.flush()
        places = {name: RowPlaces.of(dataset) for name, dataset in self._datasets.items() if dataset.size}
        return self._file.temporary, places

    def write(self, name, start, rows):
        """Put NumPy `rows`, of the dataset's type, at rows [start, start + len(rows)) of the first axis."""
        with self._file.writing():
            types.write_rows(self._datasets[name], start, rows)

    def link_shards(self, shards, shapes, dtypes):
        """Datasets whose rows lie in shard files: `shards` from every rank's ShardWriter.finish, in any order.

        shapes, dtypes: of the whole datasets, by name. Rows that no shard holds read as NaN; readers verify the
        shards' checksums first.
        """
        with self._file.writing():
            link(self._file.root, shards, shapes, dtypes)

    def finish(self, report, provenance):
        """Add report and provenance (dicts of JSON values), close, make durable and put in place."""
        with self._file.writing():
            add_report(self._file.root, report, provenance)
        with remove_replaced(self._file.path):
            self._file.commit()

    def abandon(self):
        """Remove the temporary file; harmless when finished."""
        self._file.abandon()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.abandon()


def write_results(path, results, provenance, force=False):
    """Write an output file of results that are in memory, made by whatever program.

    results: NumPy arrays by dataset name ("outputs/out", "grads/dq", ...: `schema.RESULT_TENSORS`). provenance: dict of
    JSON values that says who made them. Raises InputError for another name, or as `ResultWriter` does, and OSError.
    """
    for name in results:
        if name not in schema.RESULT_TENSORS:
            raise InputError(f"{path}: /{name}: expected a result named {', '.join(schema.RESULT_TENSORS)}")
    with ResultWriter(path, force=force) as writer:
        for name, x in results.items():
            writer.create(name, x.shape, x.dtype)
            writer.write(name, 0, x)
        writer.finish({}, provenance)


def add_report(root, report, provenance):
    """Put both (dicts of JSON values) where readers of an open h5py.File look for them."""
    types.write_json(root, "report/json", report)
    types.put_text(root.attrs, "provenance", json.dumps(provenance, ensure_ascii=False))


class ResultFile:
    """An output or golden file, open for reading; where it has shards their checksums are verified on opening.

    kind: "output" or "golden". report, provenance: dicts. Context manager.
    Raises InputError naming the file and the dataset, on opening and on reading.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        self._file = open_file(self.path, ("output", "golden"))
        try:
            with reading(self.path, "contents"):
                self.kind = types.get_text(self._file.attrs, "kind")
                self._datasets = {name: self._file[name] for name in schema.RESULT_TENSORS if name in self._file}
                boundary = self._file.get("boundary", {})
                self._datasets |= {f"boundary/{name}": boundary[name] for name in boundary}
            with reading(self.path, "/report/json"):
                self.report = types.read_json(self._file, "report/json")
            with reading(self.path, "attribute provenance"):
                self.provenance = json.loads(types.get_text(self._file.attrs, "provenance"))
            self._dtypes = {name: self._dtype(name) for name in self._datasets}
            if MANIFEST in self._file:
                with reading(self.path, MANIFEST):
                    verify(self.path, types.read_json(self._file, MANIFEST))
        except BaseException:
            self.close()
            raise

    def tensors(self):
        """Names of all tensors, such as "outputs/out" and "grads/dq", in the schema's order; boundary/* last."""
        return tuple(self._datasets)

    @property
    def cu_seqlens(self):
        """NumPy int64 [N+1], or None when the file does not tell (a golden does, an output's report may)."""
        with reading(self.path, "cu_seqlens"):
            if "inputs/cu_seqlens" in self._file:
                return self._file["inputs/cu_seqlens"][()].astype(np.int64)
            return np.array(self.report["cu_seqlens"], np.int64) if "cu_seqlens" in self.report else None

    def shape(self, name):
        return self._datasets[name].shape

    def dtype(self, name):
        return self._dtypes[name]

    def read(self, name):
        """A tensor in full, in its own type. Raises InputError when the file has none of that name."""
        if name not in self._datasets:
            raise InputError(f"{self.path}: /{name}: expected a dataset, got nothing")
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name, start, stop):
        """Rows [start, stop) of a tensor, contiguous, in its own type."""
        with reading(self.path, f"/{name}"):
            return types.read_rows(self._datasets[name], self._dtypes[name], start, stop)

    def close(self):
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _dtype(self, name):
        dataset = self._datasets[name]
        if not getattr(dataset, "shape", None):
            raise InputError(f"{self.path}: /{name}: expected a dataset with axes, got another object")
        dtype = types.float_dtype(dataset)
        if dtype is None:
            raise InputError(f"{self.path}: /{name}: expected bfloat16, float16, float32 or float64, got another type")
        return dtype
