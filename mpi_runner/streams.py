"""Standard output and error that cannot spoil the work: closed, full or no longer read, they lose text and nothing else."""

import errno
import os
import sys
from contextlib import contextmanager


@contextmanager
def forgiving_streams():
    """Inside, writing to sys.stdout or sys.stderr raises no OSError. That standard output lost text is told once on
    standard error, unless it was closed or its reader has gone.
    """
    _open_descriptors()
    before = sys.stdout, sys.stderr
    # File names may hold bytes that are no text.
    for stream in before:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.stderr = _Forgiving(before[1], lambda error: None)
    sys.stdout = _Forgiving(before[0], _tell)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _open_descriptors():
    """Give descriptors 0 to 2 something: the next file opened, an output say, would get a free one, and with it all that
    libraries print.
    """
    for wanted in range(3):
        try:
            os.fstat(wanted)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _tell(error):
    if error.errno != errno.EPIPE:
        sys.stderr.write(f"kda-engine: standard output: cannot be written: {error.strerror}\n")


class _Forgiving:
    """A text stream, or None for a closed one. failed: called once, with the OSError of the first write that failed."""

    def __init__(self, stream, failed):
        self._stream, self._failed = open(os.devnull, "w") if stream is None else stream, failed

    def write(self, text):
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self):
        self._attempt(self._stream.flush)

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def _attempt(self, action):
        try:
            action()
        except OSError as error:
            # What the stream still holds, and what the interpreter flushes at its end, goes nowhere.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._failed(error)
