"""Compiled kernels, from the disk cache or from the compiler.

A cache entry's name is a digest of the kernel's sources and headers, the defines, the target and the compiler's
version, so an entry is never out of date. The first process that wants an entry compiles it, the others wait for it
and load it. Entries are written under a temporary name and moved, so that one whole file is left in any case. An entry is
the machine code and behind it the SHA-256 of it, which is checked whenever it is read: a damaged entry is made anew.
"""

import fcntl
import hashlib
import os
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..errors import InputError
from . import build, sources


# Bytes of SHA-256.
_DIGEST = 32


def cache_folder():
    """KDA_ENGINE_CACHE where set, else kda_engine under the user's cache folder. Raises InputError where there is none."""
    given = os.environ.get("KDA_ENGINE_CACHE")
    if given:
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kda_engine"
    except RuntimeError:
        raise InputError("KDA_ENGINE_CACHE: expected the folder for compiled kernels, got none; neither XDG_CACHE_HOME "
                         "nor HOME is set, and the user has no home") from None


def cubin_path(file, defines, architecture):
    """The compiled file in the cache, compiled now if it isn't there or is damaged.

    Raises BuildError, and InputError where it cannot be written.
    """
    return _entry(file, defines, architecture)[0]


def cubin(file, defines, architecture):
    """The machine code itself, in other respects as `cubin_path`."""
    return _entry(file, defines, architecture)[1]


def _entry(file, defines, architecture):
    key = repr((sources.digest(file), defines, architecture, build.compiler_version()))
    folder = cache_folder()
    path = folder / f"{Path(file).stem}-{architecture}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    code = _read(path)
    if code is None:
        with _wanted(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "locks" / path.stem):
            code = _read(path)
            if code is None:
                code = build.compile_file(file, defines, architecture)[0]
                with _wanted(folder):
                    _write(path, code + hashlib.sha256(code).digest())
    return path, code


def _read(path):
    """The machine code of an entry, None where there is none or it is not what was written."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code, digest = content[:-_DIGEST], content[-_DIGEST:]
    return code if code and hashlib.sha256(code).digest() == digest else None


@contextmanager
def _wanted(folder):
    try:
        yield
    except OSError as error:
        raise InputError(f"KDA_ENGINE_CACHE: expected a folder that can be written to, got {folder}: {error}") from None


@contextmanager
def _lock(path):
    """One process at a time, on this node at least; freed by the system when its holder dies. Where there can be no lock,
    be it for want of them in the file system or of a right to the file, nobody waits, and work is done more than once.
    """
    with ExitStack() as held:
        try:
            path.parent.mkdir(exist_ok=True)
            fcntl.flock(held.enter_context(open(path, "w")), fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _write(path, content):
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.tmp-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(kernel, variant, device, architecture):
    """The kernel's entry point loaded on a device (CUDA's number), with its shared memory granted."""
    from cupy.cuda import Device, driver, function

    code = cubin(kernel.file, variant.defines, architecture)
    with Device(device):
        loaded = function.Module()
        loaded.load(code)
        entry = loaded.get_function(kernel.name)
        shared = kernel.shared(variant)
        if shared > 48 * 1024:
            driver.funcSetAttribute(entry.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
    return entry
