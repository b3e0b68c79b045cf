"""Number formats of the kernels' operands, and the instructions that round. Values stay float32 throughout.

    to_float16   cvt.rn.f16.f32: to nearest even, subnormal numbers kept, from 65520 on infinite (saturated: 65504)
    rounded_tf32 half a unit of the tenth mantissa bit added to the bits, the rest dropped (ties away from zero)
    truncated_tf32   what the tensor cores see of a float32 that was not rounded before
    ex2, rcp, lg2    the approximate instructions with subnormal numbers flushed; accurate here to float32's rounding,
                     on the device to 2 units more
"""

import numpy as np

F4, U4 = np.dtype("f4"), np.dtype("u4")
SMALLEST_NORMAL = np.float32(2.0**-126)


def to_float16(x):
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype("f2").astype("f4")


def to_float16_saturated(x):
    """The same with the largest finite value in place of infinity."""
    return np.clip(to_float16(x), np.float32(-65504), np.float32(65504))


def to_element(x, dtype):
    """Rounded to the type of the per-token operands; float32 again."""
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype).astype("f4")


def rounded_tf32(x):
    return _masked(np.ascontiguousarray(x, F4).view(U4) + U4.type(0x1000))


def truncated_tf32(x):
    return _masked(np.ascontiguousarray(x, F4).view(U4))


def _masked(bits):
    return (bits & U4.type(0xFFFFE000)).view(F4)


def fma(a, b, c):
    """a b + c, rounded once."""
    with np.errstate(over="ignore", invalid="ignore"):
        product = np.multiply(a, b, dtype="f8")
        product += c
        return product.astype("f4")


def ex2(x):
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return _flushed(np.exp2(x))


def rcp(x):
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return _flushed(1 / _flushed(x))


def lg2(x):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log2(_flushed(x))


def _flushed(x):
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.float32(0), x)


def exponent_of(x):
    """Of magnitudes; -127 for zero and subnormal numbers, 128 for infinity and NaN."""
    return (np.ascontiguousarray(x, F4).view(U4) >> 23).astype("i4") - 127


def power_of_two(exponent):
    return (np.asarray(127 + exponent, "u4") << U4.type(23)).view(F4)


def reciprocal_of_power(x):
    return (U4.type(254 << 23) - np.ascontiguousarray(x, F4).view(U4)).view(F4)
