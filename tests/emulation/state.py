"""The state of the carrying warps, or its gradient (kernel: `State`): float32 times a unit by 16 value columns."""

from functools import cache

import numpy as np

from .constants import constant, sampled_state_step
from .formats import exponent_of, fma, power_of_two, reciprocal_of_power, to_float16

# Value columns of a warp.
WARP_COLUMNS = 16


def by_warp(x):
    """The largest magnitude of [...,rows,V] by warp, [...,V/16]; NaN does not count."""
    x = np.abs(x).reshape(x.shape[:-1] + (x.shape[-1] // WARP_COLUMNS, WARP_COLUMNS))
    return np.fmax.reduce(np.fmax.reduce(x, axis=-1), axis=-2, initial=np.float32(0))


def largest_given(x):
    """The same of raw values, compared by their bits: NaN is the largest of all."""
    x = np.abs(x).reshape(x.shape[:-1] + (x.shape[-1] // WARP_COLUMNS, WARP_COLUMNS))
    return x.max(axis=-1).max(axis=-2)


def by_column(x):
    """[...,V/16] as factors of [...,rows,V]."""
    return np.repeat(x, WARP_COLUMNS, axis=-1)[..., None, :]


@cache
def glanced_at(K):
    """Which values of a warp's state [K,16] a glance looks at."""
    seen = np.zeros((K, WARP_COLUMNS), bool)
    for i in range(0, K // 2, sampled_state_step()):
        for lane in range(32):
            seen[8 * (i // 4) + 2 * (lane % 4) + i % 2, lane // 4 + 8 * (i // 2 % 2)] = True
    return seen


class State:
    """value [n,HV,K,V], the state times unit; unit, bound [n,HV,V/16]: bound is at least the 2-norm of any column of
    the warp's values.
    """

    def __init__(self, initial):
        self.value = initial.astype("f4")
        self.unit = np.ones(initial.shape[:2] + (initial.shape[-1] // WARP_COLUMNS,), "f4")
        self.bound = np.zeros_like(self.unit)
        self._measure(np.ones(self.unit.shape, bool))

    def running(self, n):
        """The first n sequences' state, sharing memory."""
        part = object.__new__(State)
        part.value, part.unit, part.bound = self.value[:n], self.unit[:n], self.bound[:n]
        return part

    def restored(self):
        with np.errstate(over="ignore", invalid="ignore"):
            return self.value * by_column(reciprocal_of_power(self.unit))

    def look(self, chunk):
        """Before a chunk; chunk [n]: its number."""
        measured = chunk % constant("kMeasureEvery") == 0
        glanced = ~measured & (chunk % constant("kGlanceEvery") == 0)
        which = np.broadcast_to(measured[:, None, None], self.unit.shape)
        if glanced.any():
            which = which | (glanced[:, None, None] & self._seems_small())
        if which.any():
            self._measure(which)

    def keep_range(self, value, growth):
        """Makes room for a chunk with values of at most `value` [n,HV,V/16]; returns the factor of units, or None."""
        with np.errstate(over="ignore", invalid="ignore"):
            grown = fma(growth * value, self.unit, self.bound)
            smallest = np.float32(constant("kSmallestBound"))
            fits = ((value * self.unit <= constant("kLargestValue")) & (grown <= constant("kLargestBound"))
                    & ((grown >= smallest) | (grown == 0)))
            if fits.all():
                self.bound[...] = grown
                return None
            measured = np.fmax(fma(growth * value, self.unit, self._measured()), np.float32(constant("kMiddleBound")))
            self.bound[...] = np.where(fits | (grown < smallest), grown, measured)
            return self._center(~fits)

    def round_and_decay(self, decay):
        """The state in float16; afterwards it has decayed by [n,HV,K]."""
        rounded = to_float16(self.value)
        with np.errstate(invalid="ignore"):
            self.value *= decay[..., None]
        return rounded

    def _seems_small(self):
        K = self.value.shape[-2]
        values = self.value.reshape(self.value.shape[:-1] + (self.unit.shape[-1], WARP_COLUMNS))
        seen = np.where(glanced_at(K)[:, None], np.abs(values), np.float32(0))
        return np.fmax.reduce(seen, axis=(-3, -1)) < constant("kSmallValue")

    def _measured(self):
        return np.float32(constant("kRootSize")) * by_warp(self.value)

    def _measure(self, which):
        with np.errstate(over="ignore"):
            np.copyto(self.bound, self._measured(), where=which)
            self._center(which & ((self.bound > constant("kLargestBound"))
                                  | ((self.bound < constant("kSmallestBound")) & (self.bound > 0))))

    def _center(self, which):
        """Brings the bounds of those units to the middle; returns the factors of all, None if none changes."""
        if not which.any():
            return None
        now = exponent_of(self.unit)
        wanted = np.clip(now + np.minimum(120, exponent_of(np.float32(constant("kMiddleBound")))
                                          - exponent_of(self.bound)), -100, 100)
        factor = power_of_two(np.where(which, wanted - now, 0))
        with np.errstate(over="ignore", invalid="ignore"):
            self.value *= by_column(factor)
            self.unit *= factor
            self.bound *= factor
        return factor
