// The products of sm90_gradients.cu over the value columns, in float16 with the operands' units: of tokens with tokens, and
// of tokens with the states.
#pragma once

#include "common/warp.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "tile/fused/gradient_pairs.cuh"
#include "tile/fused/gradient_tile.cuh"
#include "tile/fused/gradient_warp.cuh"

// A lane's ldmatrix address in a token record, for value columns 16 step on and 16 tokens of a chunk: matrices (value
// columns 0-7, tokens 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
__device__ inline u32 token_blocks(u32 record, int step, int chunk, int lane) {
    const int matrix = lane >> 3;
    const int block = (2 * step + (matrix & 1)) * Record::kTokenBlocks + 2 * chunk + (matrix >> 1);
    return record + (block * 8 + (lane & 7)) * 16;
}

// The same in a state record for 16 channels: (value columns 0-7, channels 0-7), (0-7, 8-15), (8-15, 0-7), (8-15,
// 8-15).
__device__ inline u32 state_blocks(u32 record, int step, int channels, int lane) {
    const int matrix = lane >> 3;
    const int block = (2 * step + (matrix >> 1)) * Record::kBlocks + 2 * channels + (matrix & 1);
    return record + (block * 8 + (lane & 7)) * 16;
}

// The factors of a tile's operands by 16 value columns (`step`). They are mostly alike for all columns: then sums need
// not be brought to a common unit on the way.
struct Factors {
    const float* at;
    bool alike;

    __device__ Factors(const float* factors, int lane) : at(factors) {
        const float first = factors[lane & 24], second = factors[32 + (lane & 24)];
        alike = __all_sync(kAllLanes, factors[lane] == first && factors[32 + lane] == second);
    }

    __device__ float get(int row, int step) const { return at[row * Record::kUnits + step]; }
};

// d += factor A B, or, if kAlike, without the factor.
template <bool kAlike>
__device__ inline void add_product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float factor) {
    if constexpr (kAlike) {
        mma_f16(d, a, b0, b1);
    } else {
        float part[4] = {};
        mma_f16(part, a, b0, b1);
#pragma unroll
        for (int e = 0; e < 4; ++e) d[e] = fmaf(factor, part[e], d[e]);
    }
}

// One 16 x 16 block of dP or X U^T, one a warp of the first kCount: token rows of one chunk, columns of the same or the one
// before.
struct TokenProducts {
    static constexpr int kCount = 6;

    float block[2][4] = {};
    int matrix, rows, columns;  // matrix 0: dP, 1: X U^T

    __device__ TokenProducts(const WarpTile& here, const Factors& factors)
        : matrix(here.warp / 3), rows(here.warp % 3 != 0), columns(here.warp % 3 == 2) {
        if (here.warp < kCount) {
            if (factors.alike) {
                multiply<true>(here, factors);
            } else {
                multiply<false>(here, factors);
            }
        }
    }

    // Where the pairs want it, X U^T as dG = -Diag(beta) X U^T; the diagonal, as it is, goes its own way.
    __device__ void place(const WarpTile& here, const PairBlocks& blocks) const {
        if (here.warp >= kCount) return;
        const float* strengths = here.floats(Tile::kStrengths);
        float* diagonal = here.floats(Tile::kDiagonals) + matrix * kTileTokens;
        const int g = here.lane >> 2, t = here.lane & 3;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const int row = 8 * m + g, column = 8 * n + 2 * t;
                const float sign = matrix == 0 ? 1.0f : -strengths[kChunk * rows + row];
                const float x = block[n][2 * m], y = block[n][2 * m + 1];
                if (rows == columns && (row == column || row == column + 1)) {
                    diagonal[kChunk * rows + row] = row == column ? x : y;
                }
                const int last = rows == columns ? row : kChunk;
                blocks.store(matrix, 2 * rows + m, 2 * columns + n, column < last ? rounded_tf32(sign * x) : 0.0f,
                             column + 1 < last ? rounded_tf32(sign * y) : 0.0f, here.lane);
            }
        }
    }

  private:
    template <bool kAlike>
    __device__ void multiply(const WarpTile& here, const Factors& factors) {
        const int lane = here.lane;
        const auto factor = [&](int step) {
            return factors.get((matrix == 0 ? kOfOut : kOfX) + rows, step) * factors.get(kOfWrites + columns, step);
        };
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            u32 a[4], b[4];
            if (matrix == 0) {
                ldmatrix(a, SwizzledTile::step(here.shared + Tile::kOut + rows * Tile::kChunkBytes +
                                                   SwizzledTile::rows_first(lane), step, SwizzledTile::kBytes));
            } else {
                u32 x[4];
                ldmatrix_transposed(x, token_blocks(here.shared + Tile::kX, step, rows, lane));
                a[0] = x[0], a[1] = x[2], a[2] = x[1], a[3] = x[3];
            }
            ldmatrix_transposed(b, token_blocks(here.shared + Tile::kWrites, step, columns, lane));
            const float of_step = kAlike ? 1.0f : factor(step);
#pragma unroll
            for (int n = 0; n < 2; ++n) add_product<kAlike>(block[n], a, b[2 * n], b[2 * n + 1], of_step);
        }
        if constexpr (kAlike) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                block[0][e] *= factor(0);
                block[1][e] *= factor(0);
            }
        }
    }
};

// The products with the states, for a warp's 16 channels.
struct StateProducts {
    ChannelTokens d_query = {}, d_key = {}, d_key_out = {};
    float total[2];  // of channels g and g + 8

    __device__ StateProducts(const WarpTile& here, const Factors& factors) {
        if (factors.alike) {
            multiply<true>(here.shared, factors, here.warp, here.lane);
        } else {
            multiply<false>(here.shared, factors, here.warp, here.lane);
        }
    }

    // d(K+) with the token's strength.
    __device__ void apply_strengths(const WarpTile& here) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float2 strength = here.of_tokens(Tile::kStrengths, n);
#pragma unroll
            for (int e = 0; e < 4; ++e) d_key[n][e] *= e % 2 == 0 ? strength.x : strength.y;
        }
    }

  private:
    template <bool kAlike>
    __device__ void multiply(u32 shared, const Factors& factors, int warp, int lane) {
        // Products of the state's rows with those of its gradient, 8 channels each; only those of a channel with itself
        // are of use.
        float totals[2][4] = {};
#pragma unroll 1
        for (int step = 0; step < 8; ++step) {
            const auto factor = [&](int row, int of_chunk) {
                return kAlike ? 1.0f : factors.get(row, step) * factors.get(of_chunk, step);
            };
            u32 state[4], gradient[4];
            ldmatrix_transposed(state, state_blocks(shared + Tile::kState, step, warp, lane));
            ldmatrix_transposed(gradient, state_blocks(shared + Tile::kStateGradient, step, warp, lane));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                add_product<kAlike>(totals[half], state, gradient[half], gradient[half + 2],
                                    factor(kOfState, kOfStateGradient));
            }
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                u32 x[4];
                ldmatrix(x, SwizzledTile::step(shared + Tile::kOut + chunk * Tile::kChunkBytes +
                                                   SwizzledTile::rows_first(lane), step, SwizzledTile::kBytes));
                float of_step = factor(kOfState, kOfOut + chunk);
                add_product<kAlike>(d_query[2 * chunk], state, x[0], x[2], of_step);
                add_product<kAlike>(d_query[2 * chunk + 1], state, x[1], x[3], of_step);
                ldmatrix_transposed(x, token_blocks(shared + Tile::kX, step, chunk, lane));
                of_step = -factor(kOfState, kOfX + chunk);
                add_product<kAlike>(d_key[2 * chunk], state, x[0], x[1], of_step);
                add_product<kAlike>(d_key[2 * chunk + 1], state, x[2], x[3], of_step);
                ldmatrix_transposed(x, token_blocks(shared + Tile::kWrites, step, chunk, lane));
                of_step = factor(kOfStateGradient, kOfWrites + chunk);
                add_product<kAlike>(d_key_out[2 * chunk], gradient, x[0], x[1], of_step);
                add_product<kAlike>(d_key_out[2 * chunk + 1], gradient, x[2], x[3], of_step);
            }
        }
        // Channel g's is held by the lane of its row at column g, and likewise for g + 8.
        const int g = lane >> 2, owner = (lane & 28) | (g >> 1);
        total[0] = __shfl_sync(kAllLanes, (g & 1) ? totals[0][1] : totals[0][0], owner);
        total[1] = __shfl_sync(kAllLanes, (g & 1) ? totals[1][3] : totals[1][2], owner);
        if constexpr (kAlike) apply(factors);
    }

    __device__ void apply(const Factors& factors) {
        const float of_state = factors.get(kOfState, 0), of_gradient = factors.get(kOfStateGradient, 0);
        total[0] *= of_state * of_gradient;
        total[1] *= of_state * of_gradient;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float of_query = of_state * factors.get(kOfOut + n / 2, 0);
            const float of_key = -of_state * factors.get(kOfX + n / 2, 0);
            const float of_key_out = of_gradient * factors.get(kOfWrites + n / 2, 0);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                d_query[n][e] *= of_query;
                d_key[n][e] *= of_key;
                d_key_out[n][e] *= of_key_out;
            }
        }
    }
};
