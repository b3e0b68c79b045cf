// The norm of q and k: x / sqrt(sum of x^2 + epsilon).
//
// Where the squares of a vector overflow float32, it is multiplied by kShrink, a power of two, and its squares are summed
// again: of no finite vector they overflow then, and of one that overflowed before no digit that counts is lost. Epsilon
// is nothing beside such squares.
#pragma once

#include "ptx/convert.cuh"

constexpr float kNormEpsilon = 1e-6f;
constexpr int kShrinkExponent = -80;
constexpr float kShrink = 0x1p-80f;

// Of the sum of the squares.
__device__ inline float reciprocal_norm(float square) { return 1.0f / sqrtf(square + kNormEpsilon); }

__device__ inline float log2_reciprocal_norm(float square) { return -0.5f * lg2(square + kNormEpsilon); }

// Of the sum of the squares of the vector times kShrink: the reciprocal norm of that.
__device__ inline float reciprocal_norm_of_shrunk(float square) { return 1.0f / sqrtf(square); }

// log2 of the reciprocal norm of the vector itself.
__device__ inline float log2_reciprocal_norm_of_shrunk(float square) { return kShrinkExponent - 0.5f * lg2(square); }

// Whether the vector has to be shrunk. Infinite elements are not mended: their results stay NaN.
__device__ inline bool squares_overflow(float square) { return isinf(square); }
