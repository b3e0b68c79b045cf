"""Kimi Delta Attention as a standalone numerical engine: forward, backward, context parallelism."""

import importlib

from .affine import Affine
from .api import ChunkStates, ForwardResult, backward, forward, short_conv, short_conv_backward, step, summarize
from .compare import compare
from .decay import Dropped
from .errors import InputError
from .finite import NonFinite
from .gate import Gradients
from .options import Options
from .version import VERSION

__version__ = VERSION
__all__ = ["Affine", "ChunkStates", "Dropped", "ForwardResult", "Gradients", "InputError", "NonFinite", "Options",
           "backward", "compare", "forward", "short_conv", "short_conv_backward", "step", "summarize"]


def __getattr__(name):
    # The one name that comes from above: for programs with a communicator of their own, loaded when it is asked for.
    if name == "distributed":
        return importlib.import_module("mpi_runner.distributed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
