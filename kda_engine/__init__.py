"""Kimi Delta Attention as a standalone numerical engine: forward, backward, context parallelism."""

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
