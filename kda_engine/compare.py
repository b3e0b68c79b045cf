"""Error metrics, and the one table of tolerances."""

from dataclasses import dataclass

import numpy as np

from .arrays import BFLOAT16, as_array, to_host

# Relative Frobenius error against the float64 recurrence that an engine computing in this type may show.
TOLERANCES = {"f8": 1e-11, "f4": 2e-5}
# The same for repeated keys with strong writes and weak decay, where the problem itself is ill-conditioned.
REPEATED_KEY_TOLERANCES = {"f8": 1e-11, "f4": 1e-3}

# The same on a CUDA device, by the inputs' type: 16-bit ones are multiplied with ten mantissa bits, and their output
# is rounded to the type (bfloat16: 1.7e-3 by that alone).
DEVICE_TOLERANCES = {"bfloat16": 3e-3, "float16": 2e-3, "float32": 2e-5}
REPEATED_KEY_DEVICE_TOLERANCES = {"bfloat16": 3e-2, "float16": 3e-2, "float32": 1e-3}
# How much more 16-bit inputs of a short convolution may show: q, k and v are rounded once more behind it.
CONVOLVED = 4

# How closely a golden is to be met: every bit of the results' type; as float64 or float32 arithmetic does; as 16-bit
# products do.
TIERS = ("bitwise", "tight", "bf16")

# Rows of a block whose error is looked at by itself.
BLOCK_ROWS = 64
# A block this much smaller than the average one is measured as if it were that large: below lies rounding.
QUIET = 1e-6


def tolerance_for(dtype, repeated_keys=False, convolved=False):
    """The relative error allowed to results from inputs of this type (the narrowest one, where they are mixed).

    repeated_keys, convolved: the inputs are an ill-conditioned problem, or go through a short convolution first.
    """
    dtype = np.dtype(dtype)
    if dtype == np.float64:
        return TOLERANCES["f8"]
    tolerance = (REPEATED_KEY_DEVICE_TOLERANCES if repeated_keys else DEVICE_TOLERANCES)[dtype.name]
    return tolerance * CONVOLVED if convolved and dtype.itemsize == 2 else tolerance


def tier_of(*dtypes):
    """The tier that results from, or in, the narrowest of these types belong to: "bf16" for a 16-bit one."""
    return "bf16" if min(np.dtype(dtype).itemsize for dtype in dtypes) == 2 else "tight"


def tolerances_of(dtype, repeated_keys=False, convolved=False):
    """The relative error allowed by tier for a problem with inputs of this type; arguments as in `tolerance_for`."""
    wide, narrow = ("float32", dtype) if np.dtype(dtype).itemsize == 2 else (dtype, BFLOAT16)
    return {"bitwise": 0.0, "tight": tolerance_for(wide, repeated_keys, convolved),
            "bf16": tolerance_for(narrow, repeated_keys, convolved)}


@dataclass(frozen=True)
class Difference:
    """How far a tensor a is from b.

    relative: ||a - b||_F / max(||b||_F, 1e-30); NaN when either holds a NaN or their shapes differ.
    peak: max |a - b| / max |b|. worst: the relative error of the worst block, worst_at: its (first row, head), None
    when no blocks were looked at. nonfinite: NaNs and infinities in a; first_nonfinite: index of the first, or None.
    """

    relative: float
    peak: float
    worst: float
    worst_at: tuple | None
    nonfinite: int
    first_nonfinite: tuple | None

    def within(self, tolerance):
        """Whether a passes as b; a NaN or an infinity never does."""
        return bool(self.relative <= tolerance) and not self.nonfinite


class Comparison:
    """A `Difference` taken slab by slab, for tensors that do not fit into memory."""

    def __init__(self):
        self._error = self._size = self._peak_error = self._peak = 0.0
        self._elements = self._nonfinite = 0
        self._first_nonfinite = None
        self._blocks = []

    def add(self, a, b, row=0, starts=None):
        """The next rows of both, NumPy [n, ...] of equal shape; `row` is the first one's place in the whole.

        starts: first rows of blocks within the slab, the first being 0; then the second axis is the heads'.
        """
        a, b = a.astype("f8"), b.astype("f8")
        bad = ~np.isfinite(a)
        if bad.any() and self._first_nonfinite is None:
            at = np.unravel_index(int(np.argmax(bad)), bad.shape)
            self._first_nonfinite = tuple(int(i) + row * (axis == 0) for axis, i in enumerate(at))
        self._nonfinite += int(np.count_nonzero(bad))
        with np.errstate(invalid="ignore", over="ignore"):
            error = a - b
            self._error, self._size = np.hypot(self._error, _norm(error)), np.hypot(self._size, _norm(b))
            self._peak_error, self._peak = np.maximum(self._peak_error, _top(error)), np.maximum(self._peak, _top(b))
            if starts is not None and len(starts):
                self._blocks.append((np.asarray(starts) + row, _block_norms(error, starts), _block_norms(b, starts),
                                     np.diff(np.append(starts, len(b))) * int(np.prod(b.shape[2:]))))
        self._elements += b.size

    def blocks(self):
        """(first row of each block [n], relative error of each block and head [n,heads]); None without blocks."""
        if not self._blocks:
            return None
        rows, errors, sizes, elements = (np.concatenate(part) for part in zip(*self._blocks))
        average = self._size * np.sqrt(elements / max(self._elements, 1))
        with np.errstate(invalid="ignore"):
            return rows, errors / np.maximum(np.maximum(sizes, QUIET * average[:, None]), 1e-30)

    def result(self):
        """The `Difference` of all rows so far."""
        with np.errstate(invalid="ignore"):
            relative, peak = self._error / max(self._size, 1e-30), self._peak_error / max(self._peak, 1e-30)
        worst, worst_at = relative, None
        blocks = self.blocks()
        if blocks is not None:
            rows, ratios = blocks
            # NaN counts as the worst there is.
            block, head = np.unravel_index(int(np.argmax(np.where(np.isnan(ratios), np.inf, ratios))), ratios.shape)
            worst, worst_at = ratios[block, head], (int(rows[block]), int(head))
        return Difference(float(relative), float(peak), float(worst), worst_at, self._nonfinite, self._first_nonfinite)


def difference(a, b, starts=None):
    """The `Difference` of two NumPy arrays; starts as in `Comparison.add`."""
    if a.shape != b.shape:
        nan = float("nan")
        return Difference(nan, nan, nan, None, 0, None)
    comparison = Comparison()
    comparison.add(a, b, starts=starts)
    return comparison.result()


def first_bad(a, b, tolerance):
    """Index of a's first value that is not finite or off by more than tolerance * max |b|, a tuple; None without one.

    NumPy arrays of one shape.
    """
    a, b = a.astype("f8"), b.astype("f8")
    with np.errstate(invalid="ignore"):
        bad = ~np.isfinite(a) | ~(np.abs(a - b) <= tolerance * _top(b))
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape)) if bad.any() else None


def compare(a, b):
    """||a - b||_F / max(||b||_F, 1e-30) in float64; 0 when both are zero or empty; NaN stays NaN."""
    a, b = (to_host(as_array(name, x)) for name, x in (("a", a), ("b", b)))
    return difference(a, b).relative


def block_starts(cu_seqlens):
    """First rows of the blocks of BLOCK_ROWS tokens, counted from each sequence's start; NumPy integers."""
    spans = zip(cu_seqlens[:-1], cu_seqlens[1:])
    return np.array([row for start, stop in spans for row in range(int(start), int(stop), BLOCK_ROWS)], np.int64)


def _top(x):
    return np.max(np.abs(x), initial=0.0)


def _norm(x):
    # Of scaled values: squares of very small or very large ones would leave float64's range.
    top = _top(x)
    return top if top == 0 else top * np.linalg.norm((x / top).ravel())


def _block_norms(x, starts):
    """[blocks, heads]; a NaN or an infinity spoils its own block only."""
    top = np.max(np.abs(x), initial=0.0, where=np.isfinite(x)) or 1.0
    squares = ((x / top) ** 2).reshape(x.shape[0], x.shape[1], -1).sum(axis=2)
    return top * np.sqrt(np.add.reduceat(squares, starts, axis=0))
