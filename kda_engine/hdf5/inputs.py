"""Input files: a strict reader that hands out rows, and the writer."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..arrays import FLOAT_TYPES
from ..cases import Case, Convolution
from ..errors import InputError
from ..options import Options
from . import direct, schema, types
from .atomic import AtomicFile
from .opening import digest, reading
from .tree import open_tree
from .trial import Trial

__all__ = ["InputFile", "digest", "write_input"]

# Bytes of a dataset from which on it is read beside the HDF5 library.
_LARGE = 1 << 20

_KNOWN = (*schema.PER_TOKEN, *schema.PARAMETERS, *schema.STATES, "cu_seqlens")
_KNOWN_CONV = tuple(f"{x}_{part}" for x in schema.CONV_CHANNELS for part in ("weight", "bias"))


class InputFile:
    """An input or golden file, open for reading; everything but the values is checked on opening.

    options: `Options` of the operator. T, H, HV, K, V, N: sizes. cu_seqlens: NumPy int64 [N+1].
    dtypes: NumPy type of each float dataset by name ("q", ..., "conv/q_weight"). conv: `cases.Convolution` or None.
    path: as given. allow_external: follow links to other files and read values stored outside HDF5 files; else both are
    refused. threads: read large datasets side by side. poll: called now and then while they read; may raise.
    Context manager. Raises InputError naming the file, the dataset, what was expected and what came; the reading
    methods too (a failed checksum, a file cut short).
    """

    def __init__(self, path, allow_external=False, trial=None, threads=1, poll=lambda: None):
        self.path, self._poll = os.fspath(path), poll
        self._pool, self._descriptor, self._places = ThreadPoolExecutor(threads), None, {}
        trial = trial or Trial(self.path, "inputs", allow_external)
        self._tree = open_tree(self.path, ("input", "golden"), trial)
        try:
            with reading(self.path, "/inputs"):
                self._datasets = self._find_datasets()
                self.options = self._read_options()
                self._check()
                self.conv = self._read_conv()
        except BaseException:
            self.close()
            raise

    def has(self, name):
        """Whether the file holds /inputs/NAME, or for "conv" the convolution."""
        return self.conv is not None if name == "conv" else name in self._datasets

    def read(self, name, start, stop):
        """Rows [start, stop) of a per-token dataset (shapes in schema.PER_TOKEN), contiguous, in its own type."""
        return self._read(name, start, stop)

    def read_whole(self, name):
        """A dataset in full, in its own type: A_log [HV], dt_bias [HV,K], states, or any other."""
        return self._read(name, 0, self._datasets[name].shape[0])

    def read_states(self, name, first, last):
        """States of the sequences [first, last) as stored: [n,HV,K,V], or [n,HV,V,K] under state_layout "VK"."""
        return self._read(name, first, last)

    def bytes_per_token(self):
        """Stored bytes of one token over all per-token datasets."""
        return sum(self.dtypes[name].itemsize * int(np.prod(self._datasets[name].shape[1:]))
                   for name in schema.PER_TOKEN if name in self._datasets)

    def read_case(self, name, repeated_keys=False):
        """The whole problem in memory as a `cases.Case` of that name; absent arrays are None."""
        arrays = {array: self.read_whole(array) if self.has(array) else None
                  for array in (*schema.PER_TOKEN, *schema.PARAMETERS, *schema.STATES)}
        return Case(name=name, **arrays, cu_seqlens=self.cu_seqlens, options=self.options, conv=self.conv,
                    repeated_keys=repeated_keys)

    def close(self):
        self._pool.shutdown()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._tree.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _where(self, name):
        return f"{self.path}: /inputs/{name}"

    def _read(self, name, start, stop):
        dataset = self._datasets[name]
        with reading(self.path, f"/inputs/{name}"):
            # The library takes one thread at a time; small datasets are not worth another way.
            if dataset.nbytes >= _LARGE and (places := self._places_of(name)) is not None:
                rows = direct.read_rows(self._descriptor, places, start, stop, self._where(name), self._pool, self._poll)
                return rows.view(self.dtypes[name]).reshape((stop - start,) + dataset.shape[1:])
            return types.read_rows(dataset, self.dtypes[name], start, stop)

    def _places_of(self, name):
        """Where the rows of a dataset lie in the file, None where the library has to read them; looked up once."""
        if name not in self._places:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            here, there = os.stat(self._descriptor), os.stat(self._datasets[name].file.filename)
            same = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
            self._places[name] = direct.RowPlaces.of(self._datasets[name]) if same else None
        return self._places[name]

    def _find_datasets(self):
        tree, found = self._tree, {}
        tree.needed_group("inputs")
        names = tree.names("inputs")
        for prefix, group, known in (("", names, _KNOWN), ("conv/", tree.names("inputs/conv"), _KNOWN_CONV)):
            for name in group:
                if prefix + name == "conv":
                    continue
                # A misspelt optional dataset would otherwise be left out without a word.
                if name not in known:
                    raise InputError(f"{self._where(prefix + name)}: expected only {', '.join(known)}, "
                                     "got another name")
                found[prefix + name] = tree.dataset(f"inputs/{prefix}{name}")
        if "conv" in names and not any(name.startswith("conv/") for name in found):
            raise InputError(f"{self._where('conv')}: expected the datasets of a convolution, got an empty group")
        return found

    def _read_options(self):
        given = {}
        attributes = self._tree.group("inputs").attrs
        for name, value in attributes.items():
            if name not in schema.OPERATOR_OPTIONS:
                raise InputError(f"{self.path}: attribute {name} of /inputs: expected only "
                                 f"{', '.join(schema.OPERATOR_OPTIONS)}, got another name")
            text = types.get_text(attributes, name)
            given[name] = text if text is not None else value.item() if isinstance(value, np.generic) else value
        try:
            return Options(**given)
        except InputError as error:
            raise InputError(f"{self.path}: attribute of /inputs: {error}") from None

    def _check(self):
        floats = {name: x for name, x in self._datasets.items() if name != "cu_seqlens"}
        self.dtypes = {name: types.float_dtype(x) for name, x in floats.items()}
        cu_seqlens = None
        if "cu_seqlens" in self._datasets:
            with reading(self.path, "/inputs/cu_seqlens"):
                cu_seqlens = types.read_integers(self._datasets["cu_seqlens"])
        sizes = schema.check_inputs(self._where, {name: x.shape for name, x in floats.items()}, self.dtypes,
                                    cu_seqlens, self.options)
        self.T, self.H, self.HV, self.K, self.V, self.N = (sizes.T, sizes.H, sizes.HV, sizes.K, sizes.V, sizes.N)
        self.cu_seqlens = sizes.cu_seqlens

    def _read_conv(self):
        if not any(name.startswith("conv/") for name in self._datasets):
            return None
        attributes = self._tree.group("inputs/conv").attrs
        activation = types.get_text(attributes, "activation") if "activation" in attributes else "silu"
        if activation not in schema.CONV_ACTIVATIONS:
            raise InputError(f"{self.path}: attribute activation of /inputs/conv: expected "
                             f"{' or '.join(schema.CONV_ACTIVATIONS)}, got {activation!r}")
        for name in _KNOWN_CONV:
            if f"conv/{name}" in self._datasets:
                with reading(self.path, f"/inputs/conv/{name}"):
                    types.check_size(self._datasets[f"conv/{name}"])
        part = lambda part: {x: self.read_whole(f"conv/{x}_{part}") for x in schema.CONV_CHANNELS
                             if f"conv/{x}_{part}" in self._datasets}
        return Convolution(schema.CONV_ACTIVATIONS[activation], part("weight"), part("bias"))


def write_input(path, *, q, k, v, g, beta, A_log=None, dt_bias=None, cu_seqlens=None, initial_state=None, d_out=None,
                d_final_state=None, conv=None, options=Options(), force=False):
    """Write an input file; nothing appears under `path` unless it is complete.

    NumPy arrays, packed: q, k [T,H,K]; v, d_out [T,HV,V]; g [T,HV,K]; beta [T,HV]; A_log [HV]; dt_bias [HV,K];
    cu_seqlens [N+1] integers; initial_state, d_final_state [N,HV,K,V] ([N,HV,V,K] under state_layout "VK");
    conv: `cases.Convolution`. force: replace an existing file.
    Raises InputError for what the reader would refuse, and OSError.
    """
    arrays = dict(q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state,
                  d_out=d_out, d_final_state=d_final_state)
    inputs = CheckedInputs(os.fspath(path), arrays, cu_seqlens, conv, options)
    with AtomicFile(path, "input", force) as file:
        with file.writing():
            inputs.put(file.root)
        file.commit()


def check_arguments(path, *, cu_seqlens=None, conv=None, options=Options(), **arrays):
    """Raise InputError where `write_input` would for these arguments; of arrays only shapes and types are looked at."""
    CheckedInputs(os.fspath(path), arrays, cu_seqlens, conv, options)


class CheckedInputs:
    """The arrays of one input, found fit for a file (else InputError); `put` writes the group /inputs.

    arrays: by dataset name, None where absent; the rest as in `write_input`. path: for messages.
    """

    def __init__(self, path, arrays, cu_seqlens, conv, options):
        self.arrays = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
        if conv is not None:
            for part, of in (("weight", conv.weights), ("bias", conv.biases)):
                self.arrays |= {f"conv/{x}_{part}": np.asarray(values) for x, values in of.items()}
        self.activation = None if conv is None else conv.activation or "none"
        self.options, self.has_cu_seqlens = options, cu_seqlens is not None
        self.sizes = schema.check_inputs(
            lambda name: f"{path}: /inputs/{name}", {name: x.shape for name, x in self.arrays.items()},
            {name: x.dtype if x.dtype in FLOAT_TYPES else None for name, x in self.arrays.items()}, cu_seqlens, options)

    def put(self, root, compress=False):
        """Write the group /inputs of an open h5py.File."""
        group = root.create_group("inputs")
        for name in schema.OPERATOR_OPTIONS:
            value = getattr(self.options, name)
            if isinstance(value, str):
                types.put_text(group.attrs, name, value)
            elif value is not None:
                group.attrs[name] = value
        for name, x in self.arrays.items():
            types.write_rows(types.create(group, name, x.shape, x.dtype, compress), 0, x)
        if self.has_cu_seqlens:
            bounds = self.sizes.cu_seqlens
            types.create(group, "cu_seqlens", bounds.shape, bounds.dtype)[...] = bounds
        if self.activation is not None:
            types.put_text(group["conv"].attrs, "activation", self.activation)
