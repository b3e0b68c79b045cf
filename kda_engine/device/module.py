"""Compiled kernels, from the disk cache or from the compiler.

A cache entry's name is a digest of the kernel's sources and headers, the defines, the target and the compiler's
version, so an entry is never out of date. The first process that wants an entry compiles it, the others wait for it
and load it. Entries are written under a temporary name and moved, so that one whole file is left in any case.
"""

import fcntl
import hashlib
import os
import tempfile
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from ..errors import InputError
from . import build, sources


def cache_folder():
    """KDA_ENGINE_CACHE where set, else kda_engine under the user's cache folder."""
    given = os.environ.get("KDA_ENGINE_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kda_engine"


def cubin_path(file, defines, architecture):
    """The compiled file in the cache, compiled now if it isn't there.

    Raises BuildError, and InputError where it cannot be written.
    """
    key = repr((sources.digest(file), defines, architecture, build.compiler_version()))
    folder = cache_folder()
    path = folder / f"{Path(file).stem}-{architecture}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    if not path.exists():
        with _wanted(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "locks" / path.stem):
            if not path.exists():
                code = build.compile_file(file, defines, architecture)[0]
                with _wanted(folder):
                    _write(path, code)
    return path


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
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@cache
def function(kernel, variant, device, architecture):
    """The kernel's entry point loaded on a device, with its shared memory granted."""
    import cupy

    path = cubin_path(kernel.file, variant.defines, architecture)
    with cupy.cuda.Device(device):
        entry = cupy.RawModule(path=str(path)).get_function(kernel.name)
        shared = kernel.shared(variant)
        if shared > 48 * 1024:
            entry.max_dynamic_shared_size_bytes = shared
    return entry
