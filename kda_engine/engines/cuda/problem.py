"""One problem as the kernels want it: contiguous arrays of one element type, float32 parameters, a plan."""

from functools import cache
from typing import NamedTuple

import cupy
import numpy as np

from ...device.kernels.portable import LARGEST_SIZE, variant
from ...device.kernels.table import ELEMENT_OF
from ...device.plans.portable import make_plan
from ...device.workspace import ALIGNMENT
from ...errors import InputError
from ...layout import CHUNK
from ...options import Options
from .activation import Activation, activation

# Bytes of the widest vector access of any kernel.
VECTOR = 16
assert ALIGNMENT % VECTOR == 0

_FLOAT32 = np.dtype("f4")


@cache
def _variant(element, K, device):
    return variant(element, K, device.target)


class Problem(NamedTuple):
    """q, k, v, g, beta: contiguous, of type `element`; A_log, dt_bias: float32 or None; cu_seqlens: NumPy, of the host.
    addresses: of these seven in this order, 0 for None. activation: what raw g, beta, q and k mean.
    """

    q: object
    k: object
    v: object
    g: object
    beta: object
    A_log: object
    dt_bias: object
    addresses: tuple
    cu_seqlens: np.ndarray
    heads: int
    value_heads: int
    K: int
    V: int
    element: str
    options: Options
    activation: Activation
    device: object

    @property
    def plan(self):
        """The Plan of the portable kernels; the last few are remembered."""
        return self.device.ready(make_plan, self.cu_seqlens.tobytes(), self.value_heads, self.K, self.V)

    @property
    def target(self):
        return self.device.target

    @property
    def variant(self):
        """The Variant of the portable kernels."""
        return _variant(self.element, self.K, self.device)

    @property
    def sequences(self):
        return len(self.cu_seqlens) - 1

    @property
    def most_chunks(self):
        """As many chunks as there are, or a few more."""
        return len(self.v) // CHUNK + len(self.cu_seqlens) - 1

    @property
    def sizes(self):
        return {"value_heads": self.value_heads, "key_size": self.K, "value_size": self.V}

    @property
    def state_floats(self):
        """Size of the states of one sequence [HV,K,V]."""
        return self.value_heads * self.K * self.V

    @property
    def transition_floats(self):
        """Size of the transitions of one sequence [HV,K,K]."""
        return self.value_heads * self.K * self.K

    def empty_like_values(self):
        """An array for the output [T,HV,V], of the element type."""
        return cupy.ndarray(self.v.shape, self.v.dtype)

    def empty_states(self):
        """An array for states [N,HV,K,V], float32."""
        return cupy.ndarray((len(self.cu_seqlens) - 1, self.value_heads, self.K, self.V), _FLOAT32)

    def zero_states(self):
        """The initial states [N,HV,K,V] of a call without any, float32."""
        return cupy.zeros((len(self.cu_seqlens) - 1, self.value_heads, self.K, self.V), _FLOAT32)


def take_problem(operands, options, device):
    """The Problem of packed operands under Options on a Device. Inputs of mixed types are computed in float32.

    Raises InputError for what `check_taken` refuses, and for arrays on another device.
    """
    check_taken(operands)
    _, heads, K = operands.k.shape
    _, value_heads, V = operands.v.shape
    try:
        element, arrays = of_one_type(operands.q, operands.k, operands.v, operands.g, operands.beta)
        arrays += parameter(operands.A_log), parameter(operands.dt_bias)
    except ValueError:
        # CuPy converts no array of another device than the current one.
        _refuse_device(operands, device)
        raise
    addresses, number = [], device.number
    for x in arrays:
        data = None if x is None else x.data
        if data is not None and data.device_id != number:
            _refuse_device(operands, device)
        addresses.append(0 if data is None else data.ptr)
    return Problem(*arrays, tuple(addresses), operands.cu_seqlens, heads, value_heads, K, V, element,
                   options, activation(options, K), device)


def _refuse_device(operands, device):
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"):
        if getattr(operands, name) is not None:
            check_device(name, getattr(operands, name), device)


def check_device(name, x, device):
    """Raises InputError for an array on another device than the one that computes."""
    if x.data.device_id != device.number and x.size:
        raise InputError(f"{name}: expected an array on the current device, {device.number}, got one on device "
                         f"{x.data.device_id}")


def check_taken(operands):
    """Raises InputError for float64 and for K or V above 256."""
    K, V = operands.k.shape[2], operands.v.shape[2]
    if K > LARGEST_SIZE or V > LARGEST_SIZE:
        name, size = ("k", K) if K > LARGEST_SIZE else ("v", V)
        raise InputError(f"{name}: expected a head size of at most {LARGEST_SIZE} for engine 'cuda', got {size}")
    if operands.state_dtype != _FLOAT32:
        raise InputError("engine: expected no float64 input for 'cuda', which computes in float32; 'numpy' and "
                         "'reference' take float64")


def of_one_type(*arrays):
    """(element, arrays): all of them contiguous in their own type, in float32 where they differ; None stays None."""
    types = {x.dtype for x in arrays if x is not None}
    dtype = types.pop() if len(types) == 1 else _FLOAT32
    return ELEMENT_OF[dtype], [None if x is None else contiguous(x, dtype) for x in arrays]


def parameter(x):
    """A_log or dt_bias as the kernels take it: float32, or None."""
    return None if x is None else contiguous(x, _FLOAT32)


def contiguous(x, dtype):
    """x in that type, contiguous and aligned for the kernels: itself where it will do."""
    if x.dtype != dtype or not x.flags.c_contiguous:
        return cupy.ascontiguousarray(x.astype(dtype))
    return x if x.data.ptr % VECTOR == 0 else x.copy()
