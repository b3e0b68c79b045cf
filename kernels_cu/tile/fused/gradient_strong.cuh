// Gradients of the log decays of single tokens that decay so strongly that the way by shared factors
// (tile/fused/gradient_pairs.cuh) loses them: it takes the difference of two sums, and e^-l of their size is left. Here only
// what spans such a token is summed: the states before and behind the tile, and the pairs of later tokens with earlier ones.
#pragma once

#include "ptx/mma.cuh"
#include "tile/fused/gradient_deep.cuh"
#include "tile/fused/gradient_pairs.cuh"
#include "tile/fused/gradient_products.cuh"
#include "tile/fused/gradient_warp.cuh"

struct StrongTokens {
    // More of them in a tile go by levels, which take all tokens at once.
    static constexpr int kMost = 16;

    u32 tokens = 0;  // a bit each, of a warp's tile; the same in all lanes

    // Those of the tile, by chunk, of which a channel of the warp has more units than `most`; units: as rows of channels.
    __device__ static StrongTokens of(const u32 (&units)[2][4], float most, int lane) {
        StrongTokens strong;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 x = HalfPair<Float16>::unpack(units[i / 4][i % 4]);
            const int token = kChunk * (i / 4) + 8 * (i % 4 / 2) + 2 * (lane & 3);
            strong.tokens |= (x.x > most ? 1u : 0u) << token | (x.y > most ? 2u : 0u) << token;
        }
        strong.tokens = __reduce_or_sync(kAllLanes, strong.tokens);
        return strong;
    }

    __device__ bool any() const { return tokens != 0; }
    __device__ bool many() const { return __popc(tokens) > kMost; }
    __device__ bool has(int token) const { return tokens >> token & 1; }

    // Parks the gradients of these tokens' log decays in Tile::kParkedDecays; products: what the states give, unchanged.
    __device__ void take(const WarpTile& here, const DeepTile& tile, StateProducts& products,
                         const PairBlocks& blocks) const {
        // Copies: what a call is given by reference has no registers elsewhere either, nor what lives over it.
        ChannelTokens d_query, d_key, d_key_out, of_decay;
        const float of_state[2] = {products.total[0], products.total[1]};
        copy(d_query, products.d_query);
        copy(d_key, products.d_key);
        copy(d_key_out, products.d_key_out);
        sum(tile, d_query, d_key, d_key_out, of_state, of_decay, blocks, here.lane);
        here.park(Tile::kParkedDecays, of_decay);
        copy(products.d_query, d_query);
        copy(products.d_key, d_key);
        copy(products.d_key_out, d_key_out);
        products.total[0] = of_state[0], products.total[1] = of_state[1];
    }

    // What was parked to where it belongs.
    __device__ void put(const WarpTile& here, ChannelTokens& of_decay) const {
        ChannelTokens own;
        here.fetch_parked(own, Tile::kParkedDecays);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (has(8 * n + 2 * (here.lane & 3) + e % 2)) of_decay[n][e] = own[n][e];
            }
        }
    }

  private:
    // of_decay of these tokens becomes what spans them; of the others it is left undefined. The other arguments as for
    // DeepTile::take. A function of its own, so that the way without strong tokens keeps its registers.
    __device__ __noinline__ void sum(const DeepTile& tile, const ChannelTokens& d_query_state,
                                     const ChannelTokens& d_key_state, const ChannelTokens& d_key_out,
                                     const float (&of_state)[2], ChannelTokens& of_decay, const PairBlocks& blocks,
                                     int lane) const {
        ChannelTokens d_query, d_key;
        copy(d_query, d_query_state);
        copy(d_key, d_key_state);
        tile.span_states(d_query, d_key, d_key_out, of_state, of_decay, lane);
        for (u32 left = tokens; left != 0; left &= left - 1) add_pairs(tile, of_decay, blocks, __ffs(left) - 1, lane);
    }

    // Pairs of the tokens from `token` on with those before it.
    __device__ void add_pairs(const DeepTile& tile, ChannelTokens& of_decay, const PairBlocks& blocks, int token,
                              int lane) const {
        const int t = lane & 3, chunk = token / kChunk;
        // What lies between the token and the chunks' meeting place, for the tokens of the other chunk.
        const auto ones = [&](int m) { return DeepTile::ones(beyond(chunk, m, token), beyond(chunk, m + 1, token)); };
        float sums[4] = {};
        mma_f16(sums, tile.units[chunk], ones(kChunk * chunk + 2 * t), ones(kChunk * chunk + 8 + 2 * t));
        float more[2][2] = {};
        more[1 - chunk][0] = tile.unit * sums[0];
        more[1 - chunk][1] = tile.unit * sums[2];
        ChannelTokens d;
        tile.decay(d, more, lane, [&](int own, int m) {
            const auto between = [&](int m) { return own >= token ? m >= token && m <= own : m > own && m < token; };
            return DeepTile::ones(between(m), between(m + 1));
        });
        float across[2] = {};
        ChannelTokens columns;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const bool is_column = 8 * n + 2 * t + e % 2 < token;
                columns[n][e] = is_column ? rounded_tf32(tile.key[n][e] * d[n][e]) : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float of_query[4] = {}, of_row[4] = {};
#pragma unroll
            for (int j = 0; j <= i; ++j) {
                if (8 * j >= token || 8 * i + 7 < token) continue;
                blocks.multiply(of_query, columns[j], 0, 0, i, j, lane);
                blocks.multiply(of_row, columns[j], 1, 0, i, j, lane);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (8 * i + 2 * t + e % 2 < token) continue;
                const float of_key = tile.key[i][e] * of_row[e];
                across[e / 2] = fmaf(d[i][e], fmaf(tile.query[i][e], of_query[e], of_key), across[e / 2]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            across[half] += __shfl_xor_sync(kAllLanes, across[half], 1);
            across[half] += __shfl_xor_sync(kAllLanes, across[half], 2);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (8 * n + 2 * t + e % 2 == token) of_decay[n][e] += across[e / 2];
            }
        }
    }

    // Whether token m of chunk `chunk` lies between `token`, of the same chunk, and the other chunk.
    __device__ static bool beyond(int chunk, int m, int token) { return chunk == 0 ? m >= token : m < token; }
};
