"""Starting MPI with a time limit: a rank that never comes would hold all others for ever in the library's own start."""

import ctypes
import os
import select
import signal
import sys
import threading
from contextlib import contextmanager

from .exit_codes import STOPPED
from .launched import launched, launched_rank


def start(timeout):
    """Start MPI where a launcher started this process and MPI has not been started yet; this process ends with code 75
    where a signal comes meanwhile or that takes more than `timeout` seconds. Without an MPI library nothing happens:
    `mpi.load` says what that means.
    """
    if not launched() or "mpi4py.MPI" in sys.modules:
        return
    import mpi4py

    # mpi4py starts MPI when it is imported, with Python's lock held; nothing else could then run, no time limit either.
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return
    with _watched(timeout):
        # The extension module is linked to the library, so that its handle finds the library's symbols.
        provided = ctypes.c_int()
        failed = ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
    if failed:
        raise RuntimeError(f"MPI_Init_thread: code {failed}")


@contextmanager
def _watched(timeout):
    """Inside, a signal or the time limit ends the process: the main thread, in the library, would notice neither."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch():
        came, _, _ = select.select([reader], [], [], timeout)
        number = os.read(reader, 1)[0] if came else None
        if number == 0:
            return
        why = f"stopped by {signal.Signals(number).name}" if came else f"not all ranks came within {timeout:g} s"
        sys.stderr.write(f"kda-engine: rank {launched_rank()}: starting MPI: {why}\n")
        sys.stderr.flush()
        os._exit(STOPPED)

    # Python's handlers run in the main thread only, but its own part in C tells of a signal at once.
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, b"\0")
        watcher.join()
        os.close(reader)
        os.close(writer)
