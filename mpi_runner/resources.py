"""Whether a run fits: bytes of memory on each node and of disk for the output, checked before anything is computed."""

import os
import shutil

from kda_engine.engines.host import HostEngine
from kda_engine.errors import InputError
from kda_engine.layout import working_type

# What a rank takes whatever its share: interpreter, slabs of engine and writer, HDF5's chunk caches.
FIXED_BYTES = 192 << 20


class ResourceError(RuntimeError):
    """The disk is too small for the job as it stands."""


def output_bytes(sizes, dtypes, backward):
    """Bytes of the output's tensors; sizes with T, H, HV, K, V, N; dtypes by input name."""
    state = sizes.N * sizes.HV * sizes.K * sizes.V * state_bytes(sizes, dtypes)
    total = sizes.T * _widths(sizes)["v"] * dtypes["v"].itemsize + state
    return total + sizes.T * token_bytes(sizes, dtypes) + state if backward else total


def input_bytes(sizes, dtypes):
    """Bytes of the input's q, k, v, g and beta; arguments as in `output_bytes`."""
    return sizes.T * token_bytes(sizes, dtypes)


def token_bytes(sizes, dtypes):
    """Bytes of one token of q, k, v, g and beta, or of their gradients."""
    return sum(width * dtypes[name].itemsize for name, width in _widths(sizes).items())


def _widths(sizes):
    """Values of one token by tensor."""
    H, HV, K, V = sizes.H, sizes.HV, sizes.K, sizes.V
    return {"q": H * K, "k": H * K, "v": HV * V, "g": HV * K, "beta": HV}


def share_bytes(sizes, dtypes, tokens, pieces, boundary, backward):
    """About the most memory that one rank of a NumPy engine takes for `tokens` of its own.

    boundary: bytes of boundary matrices, its own and other ranks', that it holds at once (`traffic.held_bytes`).
    """
    HV, K, V, width = sizes.HV, sizes.K, sizes.V, _widths(sizes)
    inputs = tokens * token_bytes(sizes, dtypes)
    out = tokens * width["v"] * dtypes["v"].itemsize
    state = HV * K * V * state_bytes(sizes, dtypes)
    total = inputs + out + 2 * pieces * state + boundary
    if backward:
        total += inputs + out + 2 * pieces * state + HostEngine.memory(tokens, pieces, state)
    if "conv/q_weight" in dtypes:
        # q, k and v before the convolution (and their gradients) stay beside those behind it; its own arrays come in
        # the working type, one of the three tensors at a time.
        before = sum(tokens * width[name] * dtypes[name].itemsize for name in "qkv")
        widest = tokens * max(width[name] * (8 if dtypes[name].itemsize == 8 else 4) for name in "qkv")
        total += 2 * before + 9 * widest if backward else before + 2 * widest
    return total + FIXED_BYTES


def state_bytes(sizes, dtypes):
    """Bytes of one state value; sizes with the `options` too."""
    return working_type(dtypes, sizes.options.gate).itemsize


def check_disk(path, needed):
    """Raises ResourceError when the output's file system has less than `needed` bytes free."""
    folder = os.path.dirname(os.path.abspath(path))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(f"output {path}: needs {needed} bytes, {folder} has {free} free")


def check_memory(needed):
    """Raises InputError when this node has less than `needed` bytes of memory available: the input is too large."""
    available = memory_available()
    if available is not None and available < needed:
        raise InputError(f"memory: the ranks of this node need {needed} bytes, {available} are available; "
                         "use more nodes or fewer tokens a rank")


def memory_available():
    """Bytes of memory that can be had on this node, or None where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
