// The two triangles of a chunk, on the tensor cores in TF32, for tile/fused/prepare.cuh.
//
//   G_ij = sum_c k_i k_j e^(gamma_i - gamma_j) for j < i,  P_ij likewise with q_i, and for j = i
//
// Where a shared factor spans the chunk's decays it is one product, (k e^(gamma - m)) (k e^(m - gamma))^T with some m for
// each channel. Where not, the pairs are dealt to levels: of two neighbouring blocks of 8, 4, 2 or 1 tokens, rows of the
// second meet columns of the first, and both take their decays from where the blocks meet, so that no factor exceeds 1.
#pragma once

#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "tile/fused/gate.cuh"
#include "tile/fused/ring.cuh"
#include "tile/shared/mma_float32.cuh"
#include "tile/shared/token_levels.cuh"

// Units of a chunk's decay that factors from the chunk's start span, as with a bounded gate: float32 and TF32 hold e^-80
// and e^80, beside a reciprocal norm of 2^-8 to 2^10.
constexpr float kMostFromStart = 80.0f * kLog2E * kGateScale;
// From the chunk's middle they span as much to either side.
constexpr float kMostFromMiddle = 2.0f * kMostFromStart;

template <bool kIsLog>
__device__ float activate_gates(u32 slot, const Gates& head, const float* bias, int lane) {
    const u32 gate = slot + Slot::kGate + SwizzledTile::rows_first(lane);
    constexpr u32 kOnes = 0x3c003c00u;
    const u32 all[4] = {kOnes, kOnes, kOnes, kOnes};
    float most = 0.0f;
#pragma unroll kPrepareUnroll
    for (int step = 0; step < kSteps; ++step) {
        const u32 place = SwizzledTile::step(gate, step, Slot::kGateDistance);
        u32 gates[4];
        ldmatrix_transposed(gates, place);
        const float early_bias = bias[16 * step + (lane >> 2)], late_bias = bias[16 * step + 8 + (lane >> 2)];
        head.activate<kIsLog>(gates, {early_bias, early_bias, late_bias, late_bias});
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            float totals[4] = {};
            mma_f16(totals, all, gates[2 * group], gates[2 * group + 1]);
            most = fmaxf(most, fmaxf(totals[0], totals[1]));
        }
        stmatrix_transposed(place, gates);
    }
    __syncwarp();
    return most;
}

// Turns the raw gates of a slot into their units, float16 in the same place, by the warp that owns the slot. Returns the
// largest total of the chunk among the lane's channels, in units. bias: of all channels, scaled.
__device__ float activate_gates(u32 slot, const Gates& head, const float* bias, int lane) {
    return head.is_log ? activate_gates<true>(slot, head, bias, lane) : activate_gates<false>(slot, head, bias, lane);
}

// Accumulators of G and P: columns 0 to 7 and 8 to 15. Elements where none should be are not masked.
struct Triangles {
    float keys_low[4] = {}, keys_high[4] = {}, queries_low[4] = {}, queries_high[4] = {};

    // Products over 8 channels. Of each: column pair 2t, 2t + 1 of rows g, then of rows g + 8.
    __device__ void add(const float (&key_in)[4], const float (&key_back)[4], const float (&query_in)[4]) {
        // The k index is free: slot t is channel 2t, slot t + 4 channel 2t + 1, as the lane holds them. Keys are
        // rounded, for equal keys round alike and errors of G would add up; of queries TF32 ignores the low bits.
        const u32 early_keys[2] = {round_tf32(key_back[0]), round_tf32(key_back[1])};
        const u32 late_keys[2] = {round_tf32(key_back[2]), round_tf32(key_back[3])};
        const u32 key_rows[4] = {round_tf32(key_in[0]), round_tf32(key_in[2]), round_tf32(key_in[1]),
                                 round_tf32(key_in[3])};
        mma_tf32(keys_low, key_rows, early_keys);
        mma_tf32(keys_high, key_rows, late_keys);
        if constexpr (kQueries) {
            const u32 query_rows[4] = {__float_as_uint(query_in[0]), __float_as_uint(query_in[2]),
                                       __float_as_uint(query_in[1]), __float_as_uint(query_in[3])};
            mma_tf32(queries_low, query_rows, early_keys);
            mma_tf32(queries_high, query_rows, late_keys);
        }
    }

    // All of the slot's tokens, raw but for the gates, level by level. unit: log2 decay of a unit of the gates.
    __device__ void multiply_deep(u32 slot, float unit, float2 key_norm, float2 query_ratio, int lane) {
        const int g = lane >> 2, t = lane & 3;
        const u32 fragment = slot + SwizzledTile::rows_first(lane);
        // The last level is each query with its own key.
#pragma unroll 1
        for (int size = kChunk / 2; size >= (kQueries ? 0 : 1); size = size > 1 ? size / 2 : size - 1) {
            const TokenLevel level = {size};
            const u32 ranges[4] = {level.range(g, 2 * t), level.range(g + 8, 2 * t), level.range(g, 8 + 2 * t),
                                   level.range(g + 8, 8 + 2 * t)};
            Triangles part;
#pragma unroll 1
            for (int step = 0; step < kSteps; ++step) {
                const u32 place = SwizzledTile::step(fragment, step, Slot::kKeyDistance);
                u32 gates[4], keys[4], queries[4];
                ldmatrix_transposed(gates, SwizzledTile::step(fragment, step, Slot::kGateDistance) + Slot::kGate);
                ldmatrix(keys, place + Slot::kKey);
                if constexpr (kQueries) ldmatrix(queries, place + Slot::kQuery);
#pragma unroll
                for (int group = 0; group < 2; ++group) {
                    float sums[4] = {}, key[4], query[4];
                    mma_f16(sums, ranges, gates[2 * group], gates[2 * group + 1]);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float norm = half == 0 ? key_norm.x : key_norm.y;
                        const float fall_x = ex2_flushed(fmaf(unit, sums[2 * half], norm));
                        const float fall_y = ex2_flushed(fmaf(unit, sums[2 * half + 1], norm));
                        const float2 x = Pair::unpack(keys[2 * group + half]);
                        key[2 * half] = x.x * fall_x;
                        key[2 * half + 1] = x.y * fall_y;
                        if constexpr (kQueries) {
                            const float2 y = Pair::unpack(queries[2 * group + half]);
                            const float ratio = half == 0 ? query_ratio.x : query_ratio.y;
                            query[2 * half] = y.x * (fall_x * ratio);
                            query[2 * half + 1] = y.y * (fall_y * ratio);
                        }
                    }
                    part.add(key, key, query);
                }
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = g + 8 * (e / 2), column = 2 * t + e % 2;
                if (level.meets(row, column)) {
                    keys_low[e] += part.keys_low[e];
                    queries_low[e] += part.queries_low[e];
                }
                if (level.meets(row, column + 8)) {
                    keys_high[e] += part.keys_high[e];
                    queries_high[e] += part.queries_high[e];
                }
            }
        }
    }
};
