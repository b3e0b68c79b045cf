// The gradients of a tile's tokens by factors that all pairs share: e^(gamma - m) of rows and e^(m - gamma) of columns, m
// being the middle of each chunk's decay.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "tile/fused/gradient_pairs.cuh"
#include "tile/fused/gradient_products.cuh"
#include "tile/fused/gradient_warp.cuh"
#include "tile/fused/token_sums.cuh"
#include "tile/shared/mma_float32.cuh"

// Units of decays up to which the pairs share factors. Of a token: where pairs share factors, the gradient of its log
// decay is the difference of two sums, and at 10 nats e^-10 times their size. It is then right to 3e-3 (a token alone among
// hardly decaying ones; rounding to bfloat16 costs 1.7e-3), at 12 nats to 1.2e-2. Beyond, the token is
// summed by itself (gradient_strong.cuh).
constexpr float kMostOfSharedToken = 10.0f * kLog2E * kGateScale;
// Of a chunk: its halves to either side of the middle.
constexpr float kMostOfSharedChunk = 80.0f * kLog2E * kGateScale;

// Half the log2 decay of a chunk for channels g and g + 8, and e^(gamma - m) of its elements.
struct ChunkDecays {
    float half[2];

    // a: the chunk's gates in units of `unit`.
    __device__ ChunkDecays(ChannelTokens& fall, int first, const u32 (&a)[4], float unit, int lane) {
        const int g = lane >> 2, t = lane & 3;
        // Column i sums tokens 0 to i.
        constexpr u32 kOnes = 0x3c003c00u;
        const u32 triangle = (2 * t <= g ? 0x3c00u : 0u) | (2 * t + 1 <= g ? 0x3c000000u : 0u);
        float early[4] = {}, late[4] = {}, all[4] = {};
        mma_f16(early, a, triangle, 0);
        mma_f16(late, a, kOnes, triangle);
        mma_f16(all, a, kOnes, kOnes);
        half[0] = 0.5f * unit * all[0];
        half[1] = 0.5f * unit * all[2];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            fall[first][e] = ex2_flushed(fmaf(unit, early[e], -half[e / 2]));
            fall[first + 1][e] = ex2_flushed(fmaf(unit, late[e], -half[e / 2]));
        }
    }
};

// The factors of both chunks of a warp's channels.
struct SharedFactors {
    ChannelTokens fall;  // e^(gamma - m)
    float early[2], late[2];  // e^m of the first chunk, of the second
    bool too_deep;  // a chunk decays by more than they span

    __device__ SharedFactors(const WarpTile& here, const WarpGates& gates) {
        u32 units[4];
        gates.fetch_units(units, here, 0);
        const ChunkDecays first(fall, 0, units, gates.gates.unit, here.lane);
        gates.fetch_units(units, here, 1);
        const ChunkDecays second(fall, 2, units, gates.gates.unit, here.lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            early[half] = ex2_flushed(first.half[half]);
            late[half] = ex2_flushed(second.half[half]);
        }
        // Of a channel of the warp, in either chunk.
        const float deepest = fminf(fminf(first.half[0], first.half[1]), fminf(second.half[0], second.half[1]));
        too_deep = 2.0f * deepest < gates.gates.unit * kMostOfSharedChunk;
    }

    // products: what the states give, of which those of the query and the key become whole; the query's is parked in
    // Tile::kParked. of_decay: the gradients of the log decays.
    __device__ void take(const WarpTile& here, StateProducts& products, ChannelTokens& of_decay, const PairBlocks& blocks,
                         float scale) {
        ChannelTokens key, x;
        const float across[2] = {early[0] * late[0], early[1] * late[1]};
        // Rows: what is still missing from dQ+ and dK+ is e^(gamma - m) and, in the second chunk, `across`.
        here.fetch_key(key);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                x[n][e] = rounded_tf32(key[n][e] * rcp(fall[n][e]));
                products.d_query[n][e] *= early[e / 2];
                products.d_key[n][e] *= early[e / 2];
                products.d_key_out[n][e] *= n < 2 ? across[e / 2] * late[e / 2] : late[e / 2];
            }
        }
        // All that is written to the state behind the tile.
        float more[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                sum = fmaf(x[n][2 * half], products.d_key_out[n][2 * half], sum);
                sum = fmaf(x[n][2 * half + 1], products.d_key_out[n][2 * half + 1], sum);
            }
            sum += __shfl_xor_sync(kAllLanes, sum, 1);
            sum += __shfl_xor_sync(kAllLanes, sum, 2);
            more[half] = fmaf(across[half] * across[half], products.total[half], sum);
        }
        here.park(Tile::kParked, products.d_key_out);
        add_rows(products.d_query, x, blocks, 0, across, here.lane);
        add_rows(products.d_key, x, blocks, 1, across, here.lane);

        // What rows give the log decays; then columns. between: the second chunk's part of the first's, without `across`.
        float between[2][4] = {};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                of_decay[n][e] = rounded_tf32(key[n][e] * fall[n][e]) * products.d_key[n][e];
                products.d_key[n][e] *= fall[n][e];
            }
        }
        {
            ChannelTokens query;
            here.fetch_query(query);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                // A token with itself.
                const float2 own = here.of_tokens(Tile::kDiagonals, n);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float scaled = scale * query[n][e], diagonal = e % 2 == 0 ? own.x : own.y;
                    x[n][e] = rounded_tf32(scaled * fall[n][e]);
                    of_decay[n][e] = fmaf(x[n][e], products.d_query[n][e], of_decay[n][e]);
                    products.d_query[n][e] = fmaf(fall[n][e], products.d_query[n][e], diagonal * key[n][e]);
                    products.d_key[n][e] = fmaf(diagonal, scaled, products.d_key[n][e]);
                }
            }
        }
        here.fetch_parked(products.d_key_out, Tile::kParked);
        here.park(Tile::kParked, products.d_query);
        add_columns(products.d_key_out, between, x, blocks, 0, here.lane);
        here.fetch_key(key);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                hold(fall[n][e]);
                x[n][e] = rounded_tf32(key[n][e] * fall[n][e]);
            }
        }
        add_columns(products.d_key_out, between, x, blocks, 1, here.lane);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float column = products.d_key_out[n][e];
                if (n < 2) column = fmaf(across[e / 2], between[n][e], column);
                const float rise = rcp(fall[n][e]);
                of_decay[n][e] = fmaf(-rounded_tf32(key[n][e] * rise), column, of_decay[n][e]);
                products.d_key[n][e] = fmaf(rise, column, products.d_key[n][e]);
            }
        }
        // From the gradients by gamma to those of the log decays.
        sum_from_token(of_decay, kTileTokens, here.lane);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) of_decay[n][e] += more[e / 2];
        }
    }
};
