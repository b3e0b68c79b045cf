"""Engines by name; each is imported only when asked for."""

from ..errors import InputError
from .base import Engine, Forward, Saved

ENGINES = ("reference", "numpy", "cuda")


def make_engine(name, poll=lambda: None):
    """The engine of that name ("reference", "numpy", "cuda", or "auto": cuda where a device is usable, else numpy)."""
    if name == "auto":
        name = "cuda" if cuda_usable() else "numpy"
    if name == "numpy":
        from .host import HostEngine

        return HostEngine(poll)
    if name == "reference":
        from .reference import ReferenceEngine

        return ReferenceEngine(poll)
    if name == "cuda":
        raise InputError("engine: 'cuda' is not built")
    raise InputError(f"engine: expected one of {', '.join(ENGINES)} or auto, got {name!r}")


def cuda_usable():
    """Whether engine "cuda" is built and finds a device here."""
    return False
