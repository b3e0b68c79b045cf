// Scalar functions that CUDA's own library does not have.
#pragma once

constexpr float kLog2E = 1.4426950408889634f;

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

// 0 where e^-x overflows; accurate to about a unit in the last place for either sign.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// log(1 + e^x) without overflow.
__device__ inline float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
