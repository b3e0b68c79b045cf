// The last steps of sm90_gradients.cu: from the gradients of the activated operands of a warp's channels to those of the
// raw ones, in the tiles where the operands were.
#pragma once

#include "common/warp.cuh"
#include "ptx/matrix.cuh"
#include "tile/fused/gate.cuh"
#include "tile/fused/gradient_products.cuh"
#include "tile/fused/gradient_warp.cuh"

// dV = Diag(beta) X of the warp's 16 value columns, where dO was.
__device__ inline void put_value_gradients(const WarpTile& here, const Factors& factors) {
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
        u32 x[4];
        ldmatrix_transposed(x, token_blocks(here.shared + Tile::kX, here.warp, chunk, here.lane));
        const float* of_chunk = here.floats(Tile::kStrengths) + kChunk * chunk + (here.lane >> 2);
        const float factor = factors.get(kOfX + chunk, here.warp);
        const float early_token = factor * of_chunk[0], late_token = factor * of_chunk[8];
        const auto converted = [&](u32 y, float beta) {
            const float2 z = HalfPair<Float16>::unpack(y);
            return Pair::pack(beta * z.x, beta * z.y);
        };
        const u32 ordered[4] = {converted(x[0], early_token), converted(x[2], late_token), converted(x[1], early_token),
                                converted(x[3], late_token)};
        stmatrix(here.shared + Tile::kOut + chunk * Tile::kChunkBytes + here.own_columns(), ordered);
    }
}

// dG where the gates were, from the gradients of the log decays; the tile's sums for dt_bias of the warp's channels
// (d_bias: those of the tile and head) and for A_log (d_rate: the warp's).
__device__ inline void put_gate_gradients(const WarpTile& here, const WarpGates& gates, const GateAdjoint& adjoint,
                                          const ChannelTokens& of_decay, float* d_bias, float* d_rate) {
    ChannelTokens x;
    here.fetch(x, Tile::kGate);
    float of_bias[2] = {}, of_rate = 0.0f;
    if (gates.gates.is_log) {
        copy(x, of_decay);
    } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float argument = fmaf(x[n][e], gates.gates.rate, gates.bias[e / 2]);
                const GateGradient one = adjoint.take(of_decay[n][e], argument);
                of_bias[e / 2] += one.raw;
                of_rate += one.rate;
                x[n][e] = one.raw;
            }
        }
    }
    here.store(Tile::kGate, x);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        of_bias[half] += __shfl_xor_sync(kAllLanes, of_bias[half], 1);
        of_bias[half] += __shfl_xor_sync(kAllLanes, of_bias[half], 2);
        if ((here.lane & 3) == 0) d_bias[here.channel() + 8 * half] = of_bias[half];
    }
    of_rate = warp_sum(of_rate);
    if (here.lane == 0) *d_rate = of_rate;
}

// Sums over the warp's channels of 16 values a lane, [key or query][8 tokens][token]: 64 sums, left two a lane.
__device__ inline float2 sum_channels(float (&x)[2][4][2], int lane) {
    float half[4][2], quarter[2][2];
    const bool upper = lane & 16, upper_half = lane & 8, upper_quarter = lane & 4;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float given = __shfl_xor_sync(kAllLanes, upper ? x[0][n][e] : x[1][n][e], 16);
            half[n][e] = (upper ? x[1][n][e] : x[0][n][e]) + given;
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float given = __shfl_xor_sync(kAllLanes, upper_half ? half[n][e] : half[n + 2][e], 8);
            quarter[n][e] = (upper_half ? half[n + 2][e] : half[n][e]) + given;
        }
    }
    float2 sums;
    sums.x = (upper_quarter ? quarter[1][0] : quarter[0][0]) +
             __shfl_xor_sync(kAllLanes, upper_quarter ? quarter[0][0] : quarter[1][0], 4);
    sums.y = (upper_quarter ? quarter[1][1] : quarter[0][1]) +
             __shfl_xor_sync(kAllLanes, upper_quarter ? quarter[0][1] : quarter[1][1], 4);
    return sums;
}

// The way back through the norms: of keys and queries, whose products with their gradients are summed over all warps. The
// whole block takes part and synchronises.
struct NormAdjoint {
    ChannelTokens key, query;  // with the norm

    __device__ NormAdjoint(const WarpTile& here, const ChannelTokens& d_query, const ChannelTokens& d_key) {
        here.fetch_key(key);
        here.fetch_query(query);
        float along[2][4][2];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                along[0][n][e] = fmaf(key[n][e], d_key[n][e], key[n][2 + e] * d_key[n][2 + e]);
                along[1][n][e] = fmaf(query[n][e], d_query[n][e], query[n][2 + e] * d_query[n][2 + e]);
            }
        }
        const int lane = here.lane;
        const float2 sums = sum_channels(along, lane);
        const float* partial = here.floats(Tile::kPartialSums);
        reinterpret_cast<float2*>(here.floats(Tile::kPartialSums))[(2 * here.warp + (lane >> 4)) * (kTileTokens / 2) +
                                                                   4 * (lane >> 2 & 3) + (lane & 3)] = sums;
        __syncthreads();
        if (threadIdx.x < 2 * kTileTokens) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += partial[i * 2 * kTileTokens + threadIdx.x];
            here.floats(Tile::kSums)[threadIdx.x] = sum;
        }
        __syncthreads();
    }

    // The gradient of the raw keys (kind 0) or queries (1), with `factor`, from that of the normed ones, in place.
    __device__ void take(const WarpTile& here, ChannelTokens& d, int kind, float factor) const {
        const ChannelTokens& x = kind == 0 ? key : query;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float2 r = here.of_tokens(Tile::kNorms + 4 * kind * kTileTokens, n);
            const float2 along = here.of_tokens(Tile::kSums + 4 * kind * kTileTokens, n);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float norm = e % 2 == 0 ? r.x : r.y, sum = e % 2 == 0 ? along.x : along.y;
                d[n][e] = norm * factor * (d[n][e] - x[n][e] * sum);
            }
        }
    }
};

// A lane's elements to float32 rows, `stride` apart; to: those of its channel g and the first token.
__device__ inline void store_channels(float* to, const ChannelTokens& x, i64 stride, int tokens, int lane) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int token = 8 * n + 2 * (lane & 3) + e % 2;
            if (token < tokens) to[token * stride + 8 * (e / 2)] = x[n][e];
        }
    }
}
