// The norm of q and k in backward_tokens.cu and the way back through it, a few tokens a warp.
#pragma once

#include "common/warp.cuh"
#include "tile/portable/token_block.cuh"
#include "tile/shared/element.cuh"
#include "tile/shared/norm.cuh"

// A lane's channels (lane, lane + 32, ...) of a warp's tokens of q or k, asked for all at once.
struct WarpRows {
    Element at[kTokensPerWarp][kKeySize / 32];

    // rows: [first token, this lane's first channel]; `tokens` of them are real, `inside` channels from there on.
    __device__ WarpRows(const Element* rows, i64 stride, int tokens, int inside) {
        Element zero;
        from_float(zero, 0.0f);
#pragma unroll
        for (int i = 0; i < kTokensPerWarp; ++i) {
#pragma unroll
            for (int j = 0; j < kKeySize / 32; ++j) {
                at[i][j] = i < tokens && 32 * j < inside ? rows[i * stride + 32 * j] : zero;
            }
        }
    }

    __device__ float square(int i) const {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kKeySize / 32; ++j) sum = fmaf(to_float(at[i][j]), to_float(at[i][j]), sum);
        return warp_sum(sum);
    }
};

// The reciprocal norm of a token whose squares overflow, by a warp. row: this lane's first channel of it, of which there
// are `inside` from there on. A function of its own: it is hardly ever called, and registers are scarce.
static __device__ __noinline__ float factor_of_large(const Element* row, int inside) {
    float sum = 0.0f;
#pragma unroll 1
    for (int j = 0; j < inside; j += 32) {
        const float x = kShrink * to_float(row[j]);
        sum = fmaf(x, x, sum);
    }
    return kShrink * reciprocal_norm_of_shrunk(warp_sum(sum));
}

__device__ inline float norm_factor(float square, const Element* row, int inside) {
    return squares_overflow(square) ? factor_of_large(row, inside) : reciprocal_norm(square);
}

// The factors of the warp's tokens of q or k; 1 where the norm is off.
__device__ inline void put_norm_factors(const TokenBlock& block, const WarpRows& raw, const Element* rows, bool enabled,
                                        float* factors) {
#pragma unroll
    for (int i = 0; i < kTokensPerWarp; ++i) {
        const Element* row = rows + block.of_warp() + i * block.key_stride();
        const float factor = norm_factor(raw.square(i), row, block.inside());
        if (block.lane == 0) factors[block.warp * kTokensPerWarp + i] = enabled ? factor : 1.0f;
    }
}

// d: gradients of the normed rows in shared memory, kStride floats from token to token, which `scale` multiplies; the raw
// rows' gradients go to `to`.
__device__ inline void put_through_norm(const TokenBlock& block, const WarpRows& raw, const float* d,
                                        const float* factors, float scale, bool enabled, Element* to) {
#pragma unroll
    for (int i = 0; i < kTokensPerWarp; ++i) {
        const int token = block.warp * kTokensPerWarp + i;
        const float* row = d + token * kStride + block.lane;
        const float factor = factors[token];
        float along = 0.0f;
#pragma unroll
        for (int j = 0; j < kKeySize / 32; ++j) {
            along = fmaf(to_float(raw.at[i][j]) * factor, row[32 * j] * scale, along);
        }
        along = enabled ? warp_sum(along) : 0.0f;
#pragma unroll
        for (int j = 0; j < kKeySize / 32; ++j) {
            if (i < block.tokens_of_warp() && 32 * j < block.inside()) {
                const float normed = to_float(raw.at[i][j]) * factor, gradient = row[32 * j] * scale;
                // Of a single channel 1 - normed^2 is what epsilon leaves, formed without the difference.
                const bool single = enabled && block.key_size == 1;
                const float across =
                    single ? kNormEpsilon * factor * factor * gradient : gradient - normed * along;
                from_float(to[block.of_warp() + i * block.key_stride() + 32 * j], factor * across);
            }
        }
    }
}
