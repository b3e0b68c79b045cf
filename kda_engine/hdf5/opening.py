"""Opening a file for strict reading: everything that can be wrong with it becomes an InputError that names it."""

import errno
import hashlib
import os
import re
from contextlib import contextmanager

import h5py
import numpy as np

from ..errors import InputError
from ..regular_file import check_regular
from . import types
from .schema import FORMAT, FORMAT_VERSION

ROOT_ATTRIBUTES = ("format", "format_version", "kind")
_DIGEST_SLAB = 8 << 20

# What locking a file fails with where there are no locks; the last is the kernel's own code, of which C knows nothing.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, 524}


def digest(path):
    """The file's SHA-256 as hexadecimal text; reads it slab by slab."""
    check_regular(path)
    sha = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while slab := file.read(_DIGEST_SLAB):
                sha.update(slab)
    except OSError as error:
        raise InputError(f"{path}: expected a readable file, got: {error.strerror}") from None
    return sha.hexdigest()


@contextmanager
def reading(path, name):
    """Turns what h5py raises inside (corrupt metadata, a failed checksum) into an InputError that says where."""
    try:
        yield
    except InputError:
        raise
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        # Checksum and compression are the filters of this package's files; so HDF5 says that one of them failed.
        what = "data that match their checksum, got a mismatch" if "filter returned failure" in str(error) else \
            f"readable data, got: {str(error) or type(error).__name__}"
        raise InputError(f"{path}: {name}: expected {what}") from error


def open_hdf5(path):
    """The open h5py.File of a regular file. Raises InputError."""
    path = os.fspath(path)
    check_regular(path, "an HDF5 file")
    try:
        return _open(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{path}: expected an HDF5 file, got {_what_it_is(path, error)}") from None


def _open(path):
    """Without locks where the file system has none, as parallel ones often do: nothing here is written in place."""
    try:
        return h5py.File(path, "r", locking="best-effort", rdcc_nbytes=types.CHUNK_CACHE_BYTES)
    except OSError as error:
        # HDF5 itself takes but one of these codes for a file system without locks.
        refused = re.search(r"unable to lock file, errno = (\d+)", str(error))
        if refused is None or int(refused[1]) not in _NO_LOCKS:
            raise
        return h5py.File(path, "r", locking=False, rdcc_nbytes=types.CHUNK_CACHE_BYTES)


def check_root(path, file, kinds, may_be_bare=False):
    """Raise InputError unless the root attributes of an open h5py.File are those of one of `kinds`.

    may_be_bare: a file with none of them is taken too, for it was written by another program.
    """
    with reading(path, "root attributes"):
        if not may_be_bare or any(name in file.attrs for name in ROOT_ATTRIBUTES):
            _check_root(path, file.attrs, kinds)


def _check_root(path, attributes, kinds):
    if (found := types.get_text(attributes, "format")) != FORMAT:
        raise InputError(f"{path}: attribute format: expected {FORMAT!r}, got {found!r}")
    version = attributes.get("format_version")
    if np.ndim(version) or version != FORMAT_VERSION:
        raise InputError(f"{path}: attribute format_version: expected {FORMAT_VERSION}, got {version}")
    if (found := types.get_text(attributes, "kind")) not in kinds:
        raise InputError(f"{path}: attribute kind: expected {' or '.join(kinds)}, got {found!r}")


def _what_it_is(path, error):
    try:
        with open(path, "rb") as file:
            head = file.read(64)
    except OSError as unreadable:
        return f"a file that cannot be read ({unreadable.strerror})"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer (run `git lfs pull`)"
    # HDF5 speaks of its superblock ("sblock") where a file is cut short, so that is asked first.
    if "truncated" in str(error):
        return f"a truncated one ({error})"
    if "unable to lock" in str(error):
        return (f"one that is open for writing elsewhere, or cannot be locked; HDF5_USE_FILE_LOCKING=FALSE reads it "
                f"unlocked ({error})")
    if not head.startswith(b"\x89HDF"):
        return "something else" if head else "an empty file"
    return f"a damaged one ({error})"
