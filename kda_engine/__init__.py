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
    # Loaded when they are asked for: what needs a device, and the one name that comes from above, for programs with a
    # communicator of their own.
    if name == "Operator":
        return importlib.import_module(".engines.cuda.operator", __name__).Operator
    if name == "distributed":
        return importlib.import_module("mpi_runner.distributed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
