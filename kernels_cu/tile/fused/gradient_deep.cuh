// The pairs of a tile of 32 tokens where no shared factor spans a chunk's decays (tile/fused/gradient_pairs.cuh has the
// other way): level by level (tile/shared/token_levels.cuh), every factor a decay and at most 1.
#pragma once

#include "common/shape.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "tile/fused/gradient_pairs.cuh"
#include "tile/fused/gradient_products.cuh"
#include "tile/fused/gradient_tile.cuh"
#include "tile/fused/gradient_warp.cuh"
#include "tile/fused/token_sums.cuh"
#include "tile/shared/token_levels.cuh"

// A warp's tile: key, and query with the scale, of its 16 channels, zero for missing tokens; units: the gates of both
// chunks as rows of channels, `unit` log2 decay each.
struct DeepTile {
    ChannelTokens key, query;
    u32 units[2][4];
    float unit;

    __device__ DeepTile(const WarpTile& here, const WarpGates& gates, float scale) : unit(gates.gates.unit) {
        gates.fetch_units(units[0], here, 0);
        gates.fetch_units(units[1], here, 1);
        here.fetch_key(key);
        here.fetch_query(query);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) query[n][e] *= scale;
        }
    }

    // Two ones in float16, or zeros.
    __device__ static u32 ones(bool first, bool second) {
        return (first ? 0x3c00u : 0u) | (second ? 0x3c000000u : 0u);
    }

    // Of every token the decay over tokens of its own chunk: bits(token, m) is a register of ones in float16 where m and
    // m + 1 count; `more` by chunk and channel beside it, log2.
    template <typename Bits>
    __device__ void decay(ChannelTokens& d, const float (&more)[2][2], int lane, Bits&& bits) const {
        const int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int first = kChunk * (n / 2);
            float sums[4] = {};
            mma_f16(sums, units[n / 2], bits(8 * n + g, first + 2 * t), bits(8 * n + g, first + 8 + 2 * t));
#pragma unroll
            for (int e = 0; e < 4; ++e) d[n][e] = ex2_flushed(fmaf(unit, sums[e], more[n / 2][e / 2]));
        }
    }

    // log2 decays of both chunks, by channel.
    __device__ void totals(float (&total)[2][2]) const {
#pragma unroll
        for (int chunk = 0; chunk < 2; ++chunk) {
            float sums[4] = {};
            mma_f16(sums, units[chunk], 0x3c003c00u, 0x3c003c00u);
            total[chunk][0] = unit * sums[0];
            total[chunk][1] = unit * sums[2];
        }
    }

    // What the states before and behind the tile give: the gradients by Q+, K+ and Kr become those of q (d_query) and k
    // (d_key); of_decay those of the log decays: sums over what spans a token and nothing else, since what e^-l leaves of it
    // is small beside what does not. of_state: d total's.
    __device__ void span_states(ChannelTokens& d_query, ChannelTokens& d_key, const ChannelTokens& d_key_out,
                                const float (&of_state)[2], ChannelTokens& of_decay, int lane) const {
        float total[2][2];
        totals(total);
        ChannelTokens d, part;
        const float before[2][2] = {{0.0f, 0.0f}, {total[0][0], total[0][1]}};
        decay(d, before, lane, [&](int token, int m) { return ones(m <= token, m + 1 <= token); });
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                d_query[n][e] *= d[n][e];
                d_key[n][e] *= d[n][e];
                of_decay[n][e] = fmaf(query[n][e], d_query[n][e], key[n][e] * d_key[n][e]);
            }
        }
        sum_from_token(of_decay, kTileTokens, lane);
        const float behind[2][2] = {{total[1][0], total[1][1]}, {0.0f, 0.0f}};
        decay(d, behind, lane, [&](int token, int m) { return ones(m > token, m + 1 > token); });
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                part[n][e] = d[n][e] * d_key_out[n][e];
                d_key[n][e] += part[n][e];
                part[n][e] *= key[n][e];
            }
        }
        sum_before_token(part, kTileTokens, lane);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float through = ex2_flushed(total[0][e / 2] + total[1][e / 2]) * of_state[e / 2];
                of_decay[n][e] += part[n][e] + through;
            }
        }
    }

    // The same with the pairs of the tile's tokens. A function of its own, so that the way without levels keeps its
    // registers.
    __device__ __noinline__ void take(ChannelTokens& d_query, ChannelTokens& d_key, const ChannelTokens& d_key_out,
                                      const float (&of_state)[2], ChannelTokens& of_decay, const PairBlocks& blocks,
                                      int lane) const {
        span_states(d_query, d_key, d_key_out, of_state, of_decay, lane);
#pragma unroll 1
        for (int size = kChunk; size > 0; size /= 2) take_level(d_query, d_key, of_decay, blocks, {size}, lane);
    }

  private:
    __device__ void take_level(ChannelTokens& d_query, ChannelTokens& d_key, ChannelTokens& of_decay,
                               const PairBlocks& blocks, TokenLevel level, int lane) const {
        const int g = lane >> 2, t = lane & 3;
        ChannelTokens d, k, q, rows = {}, columns = {};
        const float none[2][2] = {};
        decay(d, none, lane, [&](int token, int m) { return level.range(token, m); });
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                k[n][e] = rounded_tf32(key[n][e] * d[n][e]);
                q[n][e] = rounded_tf32(query[n][e] * d[n][e]);
            }
        }
        // Whole blocks of 8 tokens meet on the upper two levels, parts of a block with itself on the lower ones.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j <= i; ++j) {
                if (!(i == j ? level.size < 8 : level.meets(8 * i, 8 * j))) continue;
                const bool inside = i == j;
                const bool along_columns[2] = {!inside || level.meets(g, 2 * t), !inside || level.meets(g, 2 * t + 1)};
                const bool along_rows[2] = {!inside || level.meets(2 * t, g), !inside || level.meets(2 * t + 1, g)};
                float of_query[4] = {}, of_row[4] = {}, of_column[4] = {};
                blocks.multiply(of_query, k[j], 0, 0, i, j, along_columns, lane);
                blocks.multiply(of_row, k[j], 1, 0, i, j, along_columns, lane);
                blocks.multiply(of_column, q[i], 0, 1, i, j, along_rows, lane);
                blocks.multiply(of_column, k[i], 1, 1, i, j, along_rows, lane);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    d_query[i][e] = fmaf(d[i][e], of_query[e], d_query[i][e]);
                    d_key[i][e] = fmaf(d[i][e], of_row[e], d_key[i][e]);
                    rows[i][e] = fmaf(q[i][e], of_query[e], fmaf(k[i][e], of_row[e], rows[i][e]));
                    d_key[j][e] = fmaf(d[j][e], of_column[e], d_key[j][e]);
                    columns[j][e] = fmaf(k[j][e], of_column[e], columns[j][e]);
                }
            }
        }
        sum_from_token(rows, level.size, lane);
        sum_before_token(columns, level.size, lane);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                of_decay[n][e] += level.is_row(8 * n + 2 * t + e % 2) ? rows[n][e] : columns[n][e];
            }
        }
    }
};

// All pairs of a warp's tile by levels; as SharedFactors::take.
__device__ inline void take_by_levels(const WarpTile& here, const WarpGates& gates, StateProducts& products,
                                      ChannelTokens& of_decay, const PairBlocks& blocks, float scale) {
    const DeepTile tile(here, gates, scale);
    // Copies: what a call is given by reference has no registers elsewhere either.
    ChannelTokens d_query, d_key, d_key_out, d_decay;
    const float of_state[2] = {products.total[0], products.total[1]};
    copy(d_query, products.d_query);
    copy(d_key, products.d_key);
    copy(d_key_out, products.d_key_out);
    tile.take(d_query, d_key, d_key_out, of_state, d_decay, blocks, here.lane);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        // A token with itself.
        const float2 own = here.of_tokens(Tile::kDiagonals, n);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float diagonal = e % 2 == 0 ? own.x : own.y;
            products.d_query[n][e] = fmaf(diagonal, tile.key[n][e], d_query[n][e]);
            products.d_key[n][e] = fmaf(diagonal, tile.query[n][e], d_key[n][e]);
            of_decay[n][e] = d_decay[n][e];
        }
    }
    here.park(Tile::kParked, products.d_query);
}
