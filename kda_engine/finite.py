"""Values that cannot be right: NaN, infinities, log decay above 0; inputs on request, results as they are written."""

from dataclasses import dataclass

import numpy as np

from .arrays import array_module, to_host
from .errors import InputError


def check_values(operands, options, where="", first_token=0, first_sequence=0, **more):
    """Raise InputError naming the first bad value's argument, sequence, head and token.

    A log decay of -inf (form "log") is a legal reset. more: further arrays [T,HV,...] by name. `where` prefixes the
    message (a file, a rank); first_token and first_sequence place a share in the whole.
    """
    rows = {name: getattr(operands, name) for name in ("q", "k", "v", "g", "beta")}
    for name, x in (rows | more).items():
        bad, expectation = ~_finite(x), "finite values"
        if name == "g" and options.gate == "log":
            bad, expectation = ~(x <= 0), "log decay at most 0"
        at = _first(bad)
        if at is not None:
            sequence, token = token_place(at[0], operands.cu_seqlens)
            raise InputError(f"{where}{name}: expected {expectation}, got {x[at]} at sequence "
                             f"{sequence + first_sequence}, head {at[1]}, token {token} "
                             f"(packed token {at[0] + first_token})")
    for name in ("A_log", "dt_bias"):
        x = getattr(operands, name)
        at = None if x is None else _first(~_finite(x))
        if at is not None:
            raise InputError(f"{where}{name}: expected finite values, got {x[at]} at head {at[0]}")


def check_states(where="", first_sequence=0, **states):
    """Raise InputError naming the first state [N,HV,...] with a bad value, its sequence and head."""
    for name, x in states.items():
        at = _first(~_finite(x))
        if at is not None:
            raise InputError(f"{where}{name}: expected finite values, got {x[at]} at sequence "
                             f"{at[0] + first_sequence}, head {at[1]}")


@dataclass(frozen=True)
class NonFinite:
    """NaN and infinities in one tensor: how many, and where the first is; token counts within its sequence.

    sequence and token are None where the tensor has none.
    """

    tensor: str
    count: int
    sequence: int | None
    head: int
    token: int | None


def first_non_finite(name, x, rows, cu_seqlens=None):
    """The `NonFinite` of x, None where all values are finite; on the host or a device.

    rows: what x has a row for: "token" (x [T,heads,...], cu_seqlens [N+1]), "sequence" (x [N,heads,...]) or "head".
    """
    bad = ~_finite(x)
    at = _first(bad)
    if at is None:
        return None
    count = int(bad.sum())
    if rows == "head":
        return NonFinite(name, count, None, at[0], None)
    sequence, token = token_place(at[0], cu_seqlens) if rows == "token" else (at[0], None)
    return NonFinite(name, count, sequence, at[1], token)


def token_place(row, cu_seqlens):
    """(sequence, token within it) of a packed token."""
    sequence = int(np.searchsorted(cu_seqlens, row, side="right")) - 1
    return sequence, row - int(cu_seqlens[sequence])


class NotFinite:
    """NaN and infinities among the rows of one tensor, seen slab by slab in any order.

    count: how many values. first: (row, index on the second axis, 0 where there is none) of the first, None without.
    """

    def __init__(self):
        self.count, self.first = 0, None

    def add(self, start, rows):
        """Look at NumPy `rows`, which begin at row `start` of the tensor."""
        if _all_finite(rows):
            return
        bad = ~_finite(rows)
        row, *others = _first(bad)
        self.merge(int(bad.sum()), (start + row, others[0] if others else 0))

    def merge(self, count, first):
        """Take in what another part of the tensor, on another rank say, has found."""
        self.count += count
        if first is not None and (self.first is None or first < self.first):
            self.first = first


def _all_finite(x):
    # Conversions of 16-bit types are slow: there the largest exponent tells.
    if x.dtype.itemsize > 2:
        return bool(np.isfinite(x).all())
    infinity = np.array(np.inf, x.dtype).view("u2")
    return x.size == 0 or (x.view("u2") & infinity).max() < infinity


def _finite(x):
    return array_module(x).isfinite(x.astype("f4") if x.dtype.itemsize < 4 else x)


def _first(bad):
    """The index of the first True, or None."""
    bad = to_host(bad)
    if not bad.any():
        return None
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
