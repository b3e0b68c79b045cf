"""Calls like one that was made before: what follows from shapes, types and options alone is not worked out again."""

from typing import NamedTuple

import cupy
import numpy as np

from ...layout import Operands, Packing
from ...options import Options
from .paths import Path, forward_path, reason
from .problem import VECTOR, Problem, take_problem

# Kinds of calls that are remembered; all of them are forgotten together.
REMEMBERED = 256

_INT64 = np.dtype("i8")

# Fields of a Problem from here on are alike in all calls of a kind.
_REST = Problem._fields.index("addresses") + 1


class Call(NamedTuple):
    """A kind of call. shapes: of q, k, v, g and beta packed, None where they are given so. rest: the fields of a `Problem`
    behind its addresses. path: the Path that computes it; reason: why no faster one does.
    """

    options: Options
    packing: Packing
    shapes: tuple | None
    state_dtype: np.dtype
    rest: tuple
    path: Path
    reason: str | None

    @property
    def bounds(self):
        """cu_seqlens, NumPy int64 [N+1]."""
        return self.rest[0]

    def take(self, *arrays):
        """(Operands, Problem) of q, k, v, g, beta, A_log and dt_bias, which look as those of this kind did."""
        addresses = tuple([0 if x is None else x.data.ptr for x in arrays])
        if self.shapes is not None:
            arrays = *[x.reshape(shape) for x, shape in zip(arrays, self.shapes)], *arrays[5:]
        return Operands(*arrays, self.rest[0], self.state_dtype), Problem(*arrays, addresses, *self.rest)


class Calls:
    """The kinds of calls that were made on a Device with CuPy's own arrays, which the kernels took as they were."""

    def __init__(self, device):
        self._device, self._known = device, {}

    def look(self, arrays, cu_seqlens, options):
        """What tells one kind of call from another; None where it takes more than a look. arrays: the operands, then the
        initial state, None for each that is absent.
        """
        if cu_seqlens is not None:
            if type(cu_seqlens) is not np.ndarray or cu_seqlens.dtype != _INT64:
                return None
            cu_seqlens = cu_seqlens.tobytes()
        seen, number = [id(options), cu_seqlens], self._device.number
        for x in arrays:
            if x is None:
                seen.append(None)
                continue
            if type(x) is not cupy.ndarray:
                return None
            data = x.data
            if data.ptr % VECTOR or data.device_id != number or not x.flags.c_contiguous:
                return None
            seen.append(x.shape)
            seen.append(x.dtype)
        return tuple(seen)

    def find(self, seen):
        """The Call that looks like this, or None."""
        return self._known.get(seen)

    def add(self, seen, arrays, operands, packing, options, taken):
        """Remember a call that was checked, where kernels read the very arrays that were given.

        arrays: as for `look`; taken: the initial state as the engine got it.
        """
        problem = take_problem(operands, options, self._device)
        given = tuple(0 if x is None else x.data.ptr for x in arrays[:-1])
        if problem.addresses != given or taken is not arrays[-1] or options.state_layout != "KV":
            return
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        shapes = None if packing.batch is None else tuple(x.shape for x in problem[:5])
        # The options are held, so that no other ones get their identity.
        path = forward_path(problem)
        self._known[seen] = Call(options, packing, shapes, operands.state_dtype, tuple(problem[_REST:]), path,
                                 reason(path, problem))
