"""Schema version 1: names, kinds and shapes of everything in a file, and the check of an input against them."""

from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from ..layout import check_cu_seqlens
from ..options import Options

FORMAT = "kda-engine"
FORMAT_VERSION = 1

# Shapes in the symbols of the operator; the order of a state's last two axes is the file's state_layout.
PER_TOKEN = {
    "q": ("T", "H", "K"),
    "k": ("T", "H", "K"),
    "v": ("T", "HV", "V"),
    "g": ("T", "HV", "K"),
    "beta": ("T", "HV"),
    "d_out": ("T", "HV", "V"),
}
PARAMETERS = {"A_log": ("HV",), "dt_bias": ("HV", "K")}
STATES = {"initial_state": ("N", "HV", "K", "V"), "d_final_state": ("N", "HV", "K", "V")}
REQUIRED = ("q", "k", "v", "g", "beta")
CONV_CHANNELS = {"q": ("H", "K"), "k": ("H", "K"), "v": ("HV", "V")}
CONV_ACTIVATIONS = {"silu": "silu", "none": None}

# The options that belong to the data; the others belong to a run.
OPERATOR_OPTIONS = ("gate", "lower_bound", "beta", "qk_l2norm", "scale", "state_layout")

OUTPUTS = ("outputs/out", "outputs/final_state")
GRADIENTS = tuple(f"grads/{name}" for name in
                  ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "d_initial_state"))
CONV_GRADIENTS = tuple(f"grads/conv/d{x}_{part}" for x in "qkv" for part in ("weight", "bias"))
# Results with one row a token, and with one row a sequence; both have the heads on their second axis.
TOKEN_RESULTS = ("outputs/out", "grads/dq", "grads/dk", "grads/dv", "grads/dg", "grads/dbeta")
STATE_RESULTS = ("outputs/final_state", "grads/d_initial_state")
RESULT_TENSORS = OUTPUTS + GRADIENTS + CONV_GRADIENTS
_AXES = {"grads/dbeta": 2, "grads/dA_log": 1, "grads/ddt_bias": 2}


@dataclass(frozen=True)
class Sizes:
    """T tokens, H query/key heads, HV value heads, K and V their sizes, N sequences; cu_seqlens int64 [N+1]."""

    T: int
    H: int
    HV: int
    K: int
    V: int
    cu_seqlens: np.ndarray

    @property
    def N(self):
        return len(self.cu_seqlens) - 1

    def shape_of(self, symbols, state_layout="KV"):
        """The symbols' values; a state's last two are swapped for state_layout "VK"."""
        if len(symbols) == 4 and state_layout == "VK":
            symbols = symbols[:2] + ("V", "K")
        return tuple(getattr(self, symbol) for symbol in symbols)


def axes(result):
    """How many axes a result has, by its name such as "grads/dq" or "boundary/M"."""
    if result in TOKEN_RESULTS:
        return _AXES.get(result, 3)
    if result in CONV_GRADIENTS:
        return 1 if result.endswith("_bias") else 2
    return _AXES.get(result, 4)


def check_inputs(where, shapes, dtypes, cu_seqlens, options: Options):
    """The `Sizes` of an input, from its datasets' shapes and types.

    where: called with a dataset's name, gives the start of a message. shapes, dtypes: by name under /inputs, such as
    "q" or "conv/q_weight"; a dtype is None when it is no known float type. cu_seqlens: array or None.
    Raises InputError naming the dataset, what was expected and what came.
    """
    for name in REQUIRED:
        if name not in shapes:
            raise InputError(f"{where(name)}: expected a dataset, got nothing")
    for name, dtype in dtypes.items():
        if dtype is None:
            raise InputError(f"{where(name)}: expected bfloat16, float16, float32 or float64, got another type")
    for name in ("q", "v"):
        if len(shapes[name]) != 3 or 0 in shapes[name][1:]:
            raise InputError(f"{where(name)}: expected shape {_text(PER_TOKEN[name])} with at least one head and "
                             f"channel, got {shapes[name]}")
    (T, H, K), (HV, V) = shapes["q"], shapes["v"][1:]
    if HV % H:
        raise InputError(f"{where('v')}: expected a multiple of {H} value heads (q has {H}), got {HV}")
    if cu_seqlens is None:
        cu_seqlens = np.array([0, T])
    try:
        sizes = Sizes(T, H, HV, K, V, check_cu_seqlens(cu_seqlens, T))
    except InputError as error:
        raise InputError(f"{where('cu_seqlens')}: {str(error).removeprefix('cu_seqlens: ')}") from None
    for name, symbols in (PER_TOKEN | PARAMETERS | STATES).items():
        expected = sizes.shape_of(symbols, options.state_layout)
        if name in shapes and shapes[name] != expected:
            raise InputError(f"{where(name)}: expected shape {_text(symbols)} = {expected}, got {shapes[name]}")
    if any(name.startswith("conv/") for name in shapes):
        _check_conv(where, shapes, sizes)
    return sizes


def _check_conv(where, shapes, sizes):
    for x, (heads, size) in CONV_CHANNELS.items():
        channels = getattr(sizes, heads) * getattr(sizes, size)
        weight, bias = f"conv/{x}_weight", f"conv/{x}_bias"
        if weight not in shapes:
            raise InputError(f"{where(weight)}: expected a dataset beside the others of conv, got nothing")
        if len(shapes[weight]) != 2 or shapes[weight][0] != channels or shapes[weight][1] < 1:
            raise InputError(f"{where(weight)}: expected shape ({channels}, W), got {shapes[weight]}")
        if bias in shapes and shapes[bias] != (channels,):
            raise InputError(f"{where(bias)}: expected shape ({channels},), got {shapes[bias]}")


def _text(symbols):
    return "[" + ",".join(symbols) + "]"
