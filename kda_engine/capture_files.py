"""Files of captured tensors, npz or safetensors: names, shapes and types first, values one tensor at a time.

A capture comes from another program. An npz of 3 MB may unpack to gigabytes, and either kind may be damaged, so what a
file declares is judged before any value is read.
"""

import math
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from .arrays import BFLOAT16
from .errors import InputError
from .regular_file import check_regular

# Option entries in an npz share their names with tensors ("beta"), so they carry this prefix there; either may.
PREFIX = "option."

# Of one option's text.
_MOST_TEXT = 1 << 20

_SAFETENSORS_TYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": BFLOAT16, "I64": "i8", "I32": "i4", "I16": "i2",
                      "I8": "i1", "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?"}


@dataclass(frozen=True)
class Declared:
    """A tensor as its file declares it. dtype: NumPy's, bfloat16 included."""

    shape: tuple
    dtype: np.dtype

    def stand_in(self):
        """A read-only array of this shape and type that takes no memory."""
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)


@contextmanager
def open_capture(path):
    """A capture with `declared` ({name: Declared}), `texts` ({option's name: str}) and `read(name)`.

    Raises InputError, which names the file and the tensor; so does `read`.
    """
    kind = next((kind for kind in (".npz", ".safetensors") if str(path).endswith(kind)), None)
    if kind is None:
        raise InputError(f"{path}: expected a file named .npz or .safetensors")
    check_regular(path, "a file of captured tensors")
    if kind == ".npz":
        with _parsing(path, "an npz file of plain arrays"):
            archive = zipfile.ZipFile(path)
        with archive:
            yield _Npz(path, archive)
    else:
        from safetensors import safe_open

        with _parsing(path, "a safetensors file"):
            file = safe_open(path, "np")
        with file:
            yield _Safetensors(path, file)


class _Npz:
    def __init__(self, path, archive):
        self._path, self._archive = path, archive
        self.declared, self.texts, self._members = {}, {}, {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            with _parsing(f"{path}: {name}", "an npz file of plain arrays"):
                declared = self._header(member)
                self._members[name] = member
                if declared.shape == () or declared.dtype.kind in "US":
                    if math.prod(declared.shape) != 1 or declared.dtype.itemsize > _MOST_TEXT:
                        raise ValueError(f"one short text, got {declared.dtype} {declared.shape}")
                    self.texts[name.removeprefix(PREFIX)] = str(self._array(member).item())
                else:
                    self.declared[name] = declared

    def read(self, name):
        with _parsing(f"{self._path}: {name}", "an npz file of plain arrays"):
            x = self._array(self._members[name])
            return x.view(BFLOAT16) if x.dtype == "V2" else x

    def _header(self, member):
        """What a member's first bytes declare, if it is as long as that. Raises whatever a damaged one leads to."""
        if member.flag_bits & 1:
            raise ValueError("an encrypted one")
        with self._archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"version {version} of the format")
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else \
                np.lib.format.read_array_header_2_0
            shape, _, dtype = header(file)
            if dtype.hasobject:
                raise ValueError("Python objects")
            if any(length < 0 for length in shape) or \
                    member.file_size != file.tell() + math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{member.file_size} bytes for {dtype} {shape}")
        return Declared(shape, BFLOAT16 if dtype == "V2" else dtype)

    def _array(self, member):
        with self._archive.open(member) as file:
            return np.lib.format.read_array(file, allow_pickle=False)


class _Safetensors:
    def __init__(self, path, file):
        self._path, self._file, self.declared = path, file, {}
        for name in file.keys():
            with _parsing(f"{path}: {name}", "a tensor of a known type"):
                declared = file.get_slice(name)
                kind = declared.get_dtype()
                if kind not in _SAFETENSORS_TYPES:
                    raise ValueError(f"type {kind}")
                self.declared[name] = Declared(tuple(declared.get_shape()), np.dtype(_SAFETENSORS_TYPES[kind]))
        # "format" is what other libraries write there about themselves.
        self.texts = {name.removeprefix(PREFIX): text for name, text in (file.metadata() or {}).items()
                      if name != "format"}

    def read(self, name):
        with _parsing(f"{self._path}: {name}", "a tensor of a known type"):
            return self._file.get_tensor(name)


@contextmanager
def _parsing(where, expected):
    """Turns what a parser of foreign bytes raises into an InputError; damaged ones lead to errors of many types."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InputError(f"{where}: expected {expected}, got: {what}") from None
