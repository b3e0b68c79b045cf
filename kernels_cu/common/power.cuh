// Powers of two as scales of float32.
#pragma once

#include "common/types.cuh"

// x: a power of two, neither subnormal nor above 2^126.
__device__ inline float reciprocal_of_power(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }

// Of a magnitude; -127 for zero and subnormal numbers, 128 for infinity and NaN.
__device__ inline int exponent_of(float x) { return static_cast<int>(__float_as_uint(x) >> 23) - 127; }

__device__ inline float power_of_two(int exponent) { return __uint_as_float(static_cast<u32>(127 + exponent) << 23); }
