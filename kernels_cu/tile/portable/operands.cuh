// The operands of one chunk of one value head, as `prepare` writes and the recurrence reads them: one record of
// kRecord floats in global memory, each block in the order of its B fragments, so that a lane's values for one step
// are one aligned float4 and a warp's are contiguous.
//
//   kKeyIn     K+  [token, channel]  k e^gamma             row operand
//   kQueryIn   Q+  [token, channel]  scale q e^gamma       row operand
//   kKeyOut    Kr  [token, channel]  k e^(gamma_C - gamma) column operand
//   kDecay     e^gamma_C [channel]                         plain
//   kSolve     N Diag(beta) [token, token]                 row operand
//   kAttend    P [token, token]                            row operand
//
// Channels from the true K up to kKeySize hold zeros (kDecay: ones). For 16-bit elements every product's operand is
// stored rounded to TF32, once, instead of by every warp that reads it.
#pragma once

#include "common/shape.cuh"
#include "tile/shared/element.cuh"
#include "tile/shared/mma_float32.cuh"

// Float32 inputs are honoured in full; 16-bit inputs carry no more than TF32 holds.
constexpr int kPasses = sizeof(Element) == 4 ? 3 : 1;

// Channels per record: K rounded up to a size the kernels are compiled for.
constexpr int kKeySize = KDA_KEY_SIZE;
static_assert(kKeySize % 64 == 0 && kKeySize <= 256);

constexpr int kKeyIn = 0;
constexpr int kQueryIn = kKeyIn + kChunk * kKeySize;
constexpr int kKeyOut = kQueryIn + kChunk * kKeySize;
constexpr int kDecay = kKeyOut + kChunk * kKeySize;
constexpr int kSolve = kDecay + kKeySize;
constexpr int kAttend = kSolve + kChunk * kChunk;
constexpr int kRecord = kAttend + kChunk * kChunk;
static_assert(kRecord % 4 == 0);

// Row operand: B[k = column, n = row of the tile]. The float4 of (step, lane) is
// (row g, columns 8 step + 2t and + 1), (row g + 8, the same columns).
// Column operand: B[k = row, n = column]. The float4 of (step, lane) is
// column 8 step + g at rows 2t, 2t + 1, 2t + 8, 2t + 9.
__device__ inline float stored_operand(float x) { return kPasses == 1 ? rounded_tf32_or_nan(x) : x; }

__device__ inline float4 row_operand(const float* tile, int stride, int step, int lane) {
    const float* at = tile + (lane / 4) * stride + 8 * step + 2 * (lane % 4);
    return make_float4(stored_operand(at[0]), stored_operand(at[1]), stored_operand(at[8 * stride]),
                       stored_operand(at[8 * stride + 1]));
}

__device__ inline float4 column_operand(const float* tile, int stride, int step, int lane) {
    const float* at = tile + 2 * (lane % 4) * stride + 8 * step + lane / 4;
    return make_float4(stored_operand(at[0]), stored_operand(at[stride]), stored_operand(at[8 * stride]),
                       stored_operand(at[9 * stride]));
}
