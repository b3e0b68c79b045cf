"""Arrays from whatever the caller holds, and back: NumPy, CuPy, or anything that speaks DLPack."""

import sys

import ml_dtypes
import numpy as np

from .errors import InputError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_TYPES = tuple(np.dtype(t) for t in (ml_dtypes.bfloat16, "f2", "f4", "f8"))

# Types of arrays that are taken as they are, to be told by one look. CuPy's is added when the first one is seen.
_NATIVE = {np.ndarray}


def array_module(x):
    """numpy or cupy, whichever made x."""
    if isinstance(x, np.ndarray):
        return np
    return sys.modules["cupy"]


def as_array(name, x):
    """x as a numpy or cupy array, sharing memory where the protocol allows.

    Device memory (`__cuda_array_interface__`) becomes a CuPy array; CuPy is imported only then.
    Raises InputError naming the argument when x is no array.
    """
    if isinstance(x, np.ndarray):
        return x
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        _NATIVE.add(cupy.ndarray)
        return x
    # DLPack first: it tells the device without touching the data, and PyTorch's other interface knows no bfloat16.
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(name, x)
    if hasattr(x, "__cuda_array_interface__"):
        return _cupy(name).asarray(x)
    if hasattr(x, "__array_interface__") or isinstance(x, (list, tuple, int, float)):
        array = np.asarray(x)
        if array.dtype != object:
            return array
    raise InputError(f"{name}: expected an array (NumPy, CuPy, DLPack or an array interface), got {type(x).__name__}")


def as_float_array(name, x):
    """`as_array`, refusing every type but bfloat16, float16, float32 and float64."""
    if type(x) not in _NATIVE:
        x = as_array(name, x)
    if x.dtype not in FLOAT_TYPES:
        raise InputError(f"{name}: expected bfloat16, float16, float32 or float64, got {x.dtype}")
    return x


def _from_dlpack(name, x):
    if getattr(x, "requires_grad", False):
        x = x.detach()
    try:
        reader = np if x.__dlpack_device__()[0] == 1 else _cupy(name)
        if "bfloat16" in str(x.dtype):
            # NumPy's DLPack reader knows no bfloat16; the bits travel as 16-bit integers.
            return reader.from_dlpack(x.view(_library(x).int16)).view(BFLOAT16)
        return reader.from_dlpack(x)
    except InputError:
        raise
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{name}: expected an array that DLPack can hand over, got {type(x).__name__}: "
                         f"{error}") from None


def _cupy(name):
    """CuPy, for what lies on a device. Raises InputError naming the argument where it is absent."""
    try:
        import cupy
    except ImportError:
        raise InputError(f"{name}: expected CuPy for an array on a device; pip install 'kda-engine[cuda13]' brings it"
                         ) from None
    return cupy


def _library(x):
    """The module with the names of x's library (`from_dlpack`, `int16`, `bfloat16`); None when it has none."""
    root = type(x).__module__.split(".")[0]
    # JAX's arrays are of a class in its compiled part.
    return sys.modules.get("jax.numpy" if root == "jaxlib" else root)


def to_host(x):
    """x as a NumPy array (a copy when it lives on a device)."""
    return x if isinstance(x, np.ndarray) else x.get()


def like(array, example):
    """`array` in the array module of `example` (the caller's own object).

    NumPy and CuPy callers get their own kind; other DLPack libraries get theirs through `from_dlpack`.
    """
    if array is None or isinstance(example, type(array)):
        return array
    if isinstance(example, np.ndarray):
        return to_host(array)
    maker = _library(example)
    if maker is not None and maker.__name__ == "cupy":
        return maker.asarray(array)
    if not hasattr(maker, "from_dlpack"):
        return array
    if array.dtype == BFLOAT16:
        return maker.from_dlpack(array.view("i2")).view(maker.bfloat16)
    return maker.from_dlpack(array)


def brief(x):
    """An array for people: its type and shape, not its values; None as it is."""
    return "None" if x is None else f"{type(x).__module__.split('.')[0]} {x.dtype} {tuple(x.shape)}"
