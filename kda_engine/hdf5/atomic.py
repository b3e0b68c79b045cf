"""A file that appears under its name complete or not at all, also when the disk fills."""

import errno
import os
import secrets
import stat
from contextlib import contextmanager, suppress

import h5py
import numpy as np

from ..errors import InputError
from ..regular_file import what_is
from . import types
from .schema import FORMAT, FORMAT_VERSION

# Larger objects start on a multiple of this many bytes. Then no page of a file that several ranks write to holds the
# data of two of them; some network file systems lose such writes.
ALIGNMENT = 1 << 16

# Failures of the disk or the machine; every other one is about the name that was asked for.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE)


class AtomicFile:
    """An HDF5 file in the making: `.NAME.tmp-<id>` beside its final place.

    root: the open h5py.File. Call `commit` to put it in place; leaving the context without it removes everything.
    Only a regular file, or a link to one or to nothing, is replaced; the new file has the old one's mode, and its owner
    and group where the system allows that. Raises InputError when `path` is taken and not `force`, is something else
    than a file, or its folder cannot be written to; OSError when the disk is full or fails.
    """

    def __init__(self, path, kind, force=False):
        self.path, self.force = absolute(path), force
        replaced = self._find_replaced()
        folder, name = os.path.split(self.path)
        if not os.path.isdir(folder):
            raise InputError(f"{path}: expected an existing folder, got {folder}")
        self.temporary = os.path.join(folder, f".{name}.tmp-{secrets.token_hex(4)}")
        with refusing(path):
            self._sink = _Sink(self.temporary, replaced)
        self._open, self.root = True, None
        try:
            # The format of 1.10 and later keeps checksums of its own structures, the older one does not.
            self.root = h5py.File(self._sink, "w", libver=("v110", "v110"), rdcc_nbytes=types.CHUNK_CACHE_BYTES,
                                  alignment_threshold=ALIGNMENT, alignment_interval=ALIGNMENT)
            types.put_text(self.root.attrs, "format", FORMAT)
            types.put_text(self.root.attrs, "kind", kind)
            self.root.attrs["format_version"] = FORMAT_VERSION
        except BaseException:
            self.abandon()
            raise

    @contextmanager
    def writing(self):
        """Raises the OSError that a write inside met on disk, and leaves nothing behind."""
        try:
            yield
        except Exception:
            # After a failed write HDF5 may stumble over its own consequences; the cause is what counts.
            self._raise_failed_write()
            raise
        self._raise_failed_write()

    def flush(self):
        """Hand everything so far to the operating system. Raises OSError when the disk is full."""
        with self.writing():
            self.root.flush()

    def commit(self):
        """Close, make durable, put in place. Raises OSError (then nothing is left) or InputError (name taken)."""
        try:
            with self.writing():
                self.root.close()
            _keep_mode(self._sink.descriptor, self._find_replaced())
            os.fsync(self._sink.descriptor)
            os.replace(self.temporary, self.path)
        except BaseException:
            self.abandon()
            raise
        self._open = False
        self._sink.close()
        sync_folder(os.path.dirname(self.path))

    def abandon(self):
        """Remove the temporary file; harmless after `commit` or a first call."""
        if not self._open:
            return
        self._open = False
        self._sink.discard()
        try:
            if self.root is not None:
                self.root.close()
        finally:
            self._sink.close()
            # A shard's whole folder may be gone by now.
            with suppress(FileNotFoundError):
                os.unlink(self.temporary)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.abandon()

    def _raise_failed_write(self):
        if self._sink.error is not None:
            self.abandon()
            raise self._sink.error

    def _find_replaced(self):
        """The os.stat_result of the file that will be replaced, None without one. Raises InputError."""
        try:
            there = os.lstat(self.path)
            if stat.S_ISLNK(there.st_mode):
                # The link is replaced, not what it leads to: nothing, or a file whose mode is kept.
                with suppress(FileNotFoundError):
                    there = os.stat(self.path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path}: expected a file name, got: {getattr(error, 'strerror', error)}") from None
        if not (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)):
            raise InputError(f"{self.path}: expected a file name, got {what_is(there.st_mode)}")
        if not self.force:
            raise InputError(f"{self.path}: expected a name not taken yet, got an existing file (--force replaces it)")
        return there if stat.S_ISREG(there.st_mode) else None


def absolute(path):
    """The absolute path of a file to be written. Raises InputError for a folder's name or one that cannot be."""
    folder, name = os.path.split(os.fspath(path))
    if name in ("", ".", ".."):
        raise InputError(f"{path}: expected a file name, got a folder's")
    try:
        # As the system reads it: ".." leads out of what a link leads to.
        return os.path.join(os.path.realpath(folder or "."), name)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a name in a folder that exists, got: "
                         f"{getattr(error, 'strerror', error)}") from None


@contextmanager
def refusing(path):
    """Turns an OSError inside that is about the name of `path`, not about disk or machine, into an InputError."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK:
            raise
        raise InputError(f"{path}: expected a name in a folder to write to, got: {error.strerror}") from None


def _keep_mode(descriptor, like):
    """Give an open file the mode of `like` (os.stat_result or None), and its owner and group where that is allowed."""
    if like is None:
        return
    with suppress(OSError):
        os.fchown(descriptor, like.st_uid, like.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(like.st_mode))


def sync_folder(folder):
    """Make the folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Sink:
    """The file object HDF5 writes to. It keeps the first error and tells HDF5 that all is well.

    HDF5 does not survive a failed write: it tries again at close and at interpreter exit and may crash there.
    """

    def __init__(self, path, like=None):
        """like: os.stat_result of the file whose mode, and owner if possible, this one is to have."""
        # Nobody else may read meanwhile what the old file hides.
        mode = 0o666 if like is None else 0o600
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        self.error = None
        self._discarding = False
        self._position = 0

    def seek(self, offset, whence=os.SEEK_SET):
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: os.fstat(self.descriptor).st_size}[whence]
        self._position = base + offset
        return self._position

    def tell(self):
        return self._position

    def read(self, size):
        raise NotImplementedError("HDF5 reads through readinto")

    def readinto(self, buffer):
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and (count := os.preadv(self.descriptor, [view[done:]], self._position + done)):
            done += count
        # Bytes that a failed write never brought to disk read as zeros, for the same reason as in `_attempt`.
        view[done:] = bytes(len(view) - done)
        self._position += len(view)
        return len(view)

    def write(self, data):
        view = memoryview(data).cast("B")
        self._attempt(self._write_all, view)
        self._position += len(view)
        return len(view)

    def truncate(self, size):
        self._attempt(os.ftruncate, self.descriptor, size)
        return size

    def flush(self):
        pass

    def discard(self):
        """Write nothing from now on."""
        self._discarding = True

    def close(self):
        os.close(self.descriptor)

    def _write_all(self, view):
        if self._is_hole(view):
            os.ftruncate(self.descriptor, self._position + len(view))
            return
        done = 0
        while done < len(view):
            done += os.pwrite(self.descriptor, view[done:], self._position + done)

    def _is_hole(self, view):
        """Whether these are zeros behind the file's end, which read as zeros without being written.

        HDF5 writes such zeros where it gives all chunks of a dataset their places at once.
        """
        return (len(view) >= ALIGNMENT and self._position >= os.fstat(self.descriptor).st_size
                and not np.frombuffer(view, np.uint8).any())

    def _attempt(self, action, *arguments):
        """Do it unless something failed before; a failure is kept, and HDF5 goes on none the wiser."""
        if self._discarding or self.error is not None:
            return
        try:
            action(*arguments)
        except OSError as error:
            self.error = error
