"""Result files: a writer that takes slabs of rows, and a strict reader of outputs and goldens."""

import json
import os

import numpy as np

from ..errors import InputError
from ..layout import check_cu_seqlens
from . import schema, types
from .atomic import AtomicFile
from .direct import RowPlaces
from .opening import reading
from .shards import link, read_manifest, remove_replaced, sharded_rows
from .tree import open_tree
from .trial import Trial


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

    kind: "output" or "golden". report, provenance: dicts, empty where the file has none. Context manager.
    Raises InputError naming the file and the dataset, on opening and on reading.
    """

    def __init__(self, path, trial=None):
        self.path = os.fspath(path)
        trial = trial or Trial(self.path, "results")
        self._tree = open_tree(self.path, ("output", "golden"), trial, may_be_bare=True)
        try:
            with reading(self.path, "root attributes"):
                attributes = self._tree.file.attrs
                self.kind = types.get_text(attributes, "kind") or "output"
            # Both are absent in a file that another program wrote with an HDF5 library alone.
            self.report = self._read_report()
            with reading(self.path, "attribute provenance"):
                text = types.get_text(attributes, "provenance") if "provenance" in attributes else "{}"
                self.provenance = json.loads(text)
            self._rows = self._find_rows()
        except BaseException:
            self.close()
            raise

    def tensors(self):
        """Names of all tensors, such as "outputs/out" and "grads/dq", in the schema's order; boundary/* last."""
        return tuple(self._rows)

    @property
    def cu_seqlens(self):
        """NumPy int64 [N+1], or None when the file does not tell (a golden does, an output's report may)."""
        stored = self._tree.dataset("inputs/cu_seqlens")
        with reading(self.path, "cu_seqlens"):
            bounds = self.report.get("cu_seqlens") if stored is None else types.read_integers(stored)
            if bounds is None:
                return None
            tokens = [rows.shape[0] for name, rows in self._rows.items() if name in schema.TOKEN_RESULTS]
            return check_cu_seqlens(np.array(bounds, np.int64), tokens[0] if tokens else bounds[-1])

    def shape(self, name):
        return self._rows[name].shape

    def dtype(self, name):
        return self._rows[name].dtype

    def read(self, name):
        """A tensor in full, in its own type. Raises InputError when the file has none of that name."""
        if name not in self._rows:
            raise InputError(f"{self.path}: /{name}: expected a dataset, got nothing")
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name, start, stop):
        """Rows [start, stop) of a tensor, contiguous, in its own type."""
        with reading(self.path, f"/{name}"):
            return self._rows[name].read(start, stop)

    def close(self):
        self._tree.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _read_report(self):
        stored = self._tree.dataset("report/json")
        with reading(self.path, "/report/json"):
            report = {} if stored is None else types.read_json(stored)
            if not isinstance(report, dict):
                raise TypeError(f"expected a JSON object, got a {type(report).__name__}")
            return report

    def _find_rows(self):
        """Every tensor's rows by its name, in the schema's order, boundary/* last."""
        tree, found = self._tree, {}
        sharded = sharded_rows(self.path, read_manifest(tree))
        for name in (*schema.RESULT_TENSORS, *(f"boundary/{name}" for name in tree.names("boundary"))):
            # The virtual dataset over shards is for other tools: HDF5 may crash on a damaged one.
            rows = sharded.get(name)
            if rows is None:
                dataset = tree.dataset(name)
                if dataset is None:
                    continue
                rows = types.Rows(dataset)
            if len(rows.shape) != schema.axes(name):
                raise InputError(f"{self.path}: /{name}: expected {schema.axes(name)} axes, got shape {rows.shape}")
            if rows.dtype is None:
                raise InputError(f"{self.path}: /{name}: expected bfloat16, float16, float32 or float64, got another "
                                 "type")
            found[name] = rows
        return found
