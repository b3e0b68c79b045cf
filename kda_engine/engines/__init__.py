"""Engines by name; each is imported only when asked for."""

from functools import cache

from ..errors import InputError
from .base import Engine, Forward, Saved

ENGINES = ("reference", "numpy", "cuda")


def _no_poll():
    pass


def make_engine(name, poll=_no_poll, threads=None):
    """The engine of that name ("reference", "numpy", "cuda", or "auto": cuda where a device is usable, else numpy).

    Without a poll of one's own, "cuda" is one engine for all callers on a device.
    """
    if name == "auto":
        name = "cuda" if cuda_usable() else "numpy"
    if name == "numpy":
        from .host import HostEngine

        return HostEngine(poll, threads)
    if name == "reference":
        from .reference import ReferenceEngine

        return ReferenceEngine(poll)
    if name == "cuda":
        if not cuda_usable():
            raise InputError("engine: expected CuPy and a CUDA device of compute capability 8.0 or later for 'cuda', "
                             "got none")
        return _cuda_engine(_runtime().getDevice()) if poll is _no_poll else _make_cuda_engine(poll)
    raise InputError(f"engine: expected one of {', '.join(ENGINES)} or auto, got {name!r}")


@cache
def _cuda_engine(device):
    """The engine that calls on this device, the current one, share."""
    return _make_cuda_engine(_no_poll)


def _make_cuda_engine(poll):
    from .cuda import CudaEngine

    return CudaEngine(poll)


@cache
def _runtime():
    # Remembered: an import statement in every call would take longer than what is asked here.
    from cupy.cuda import runtime

    return runtime


@cache
def cuda_usable():
    """Whether CuPy is installed and finds a device that engine "cuda" can use."""
    try:
        runtime = _runtime()
        return runtime.getDeviceCount() > 0 and runtime.getDeviceProperties(runtime.getDevice())["major"] >= 8
    except (ImportError, RuntimeError):
        return False
