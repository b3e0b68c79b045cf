// Products between the tokens of a tile of 32, on the tensor cores in TF32, with the channels as rows: a warp has 16
// channels, a lane (g = lane / 4, t = lane % 4) of every 8 tokens those at 2t and 2t + 1 of channels g and g + 8.
//
// dP and dG, strictly lower triangular, lie in shared memory as 8 x 8 blocks in the order of B fragments, by row tile i
// and column tile j: once with the columns along k (rows of K-), once with the rows along k (columns of K+, Q+).
#pragma once

#include "ptx/mma.cuh"
#include "tile/shared/mma_float32.cuh"

// Elements of a warp's 16 channels and 32 tokens: [8 tokens][(g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)].
using ChannelTokens = float[4][4];

struct PairBlocks {
    static constexpr int kBlockFloats = 64;
    static constexpr int kMatrixFloats = 16 * kBlockFloats;

    float* at;

    // [matrix: 0 dP, 1 dG][along k: 0 columns, 1 rows]
    __device__ float* block(int matrix, int along, int i, int j) const {
        return at + (2 * matrix + along) * kMatrixFloats + (4 * i + j) * kBlockFloats;
    }

    // x, y: elements (8 i + g, 8 j + 2t) and (.., 2t + 1), rounded to TF32; zero where not strictly below the diagonal.
    __device__ void store(int matrix, int i, int j, float x, float y, int lane) const {
        const int g = lane >> 2, t = lane & 3;
        reinterpret_cast<float2*>(block(matrix, 0, i, j))[lane] = make_float2(x, y);
        float* rows = block(matrix, 1, i, j) + (g & 1);
        rows[2 * (8 * t + (g >> 1))] = x;
        rows[2 * (8 * t + 4 + (g >> 1))] = y;
    }

    __device__ void multiply(float (&d)[4], const float (&a)[4], int matrix, int along, int i, int j, int lane) const {
        constexpr bool kAll[2] = {true, true};
        multiply(d, a, matrix, along, i, j, kAll, lane);
    }

    // counts: whether the lane's two elements do; elements (g, 2t) and (g, 2t + 1) along the columns, (2t, g) and
    // (2t + 1, g) along the rows.
    __device__ void multiply(float (&d)[4], const float (&a)[4], int matrix, int along, int i, int j,
                             const bool (&counts)[2], int lane) const {
        float2 b = reinterpret_cast<const float2*>(block(matrix, along, i, j))[lane];
        if (!counts[0]) b.x = 0.0f;
        if (!counts[1]) b.y = 0.0f;
        const u32 rows[4] = {__float_as_uint(a[0]), __float_as_uint(a[2]), __float_as_uint(a[1]),
                             __float_as_uint(a[3])};
        const u32 columns[2] = {__float_as_uint(b.x), __float_as_uint(b.y)};
        mma_tf32(d, rows, columns);
    }
};

// d_i += sum_j x_j m_ij. Pairs of different chunks get the factor `across` (of channels g and g + 8). On entry the second
// chunk's part of d has not been multiplied by it either; this function does both.
__device__ inline void add_rows(ChannelTokens& d, const ChannelTokens& x, const PairBlocks& blocks, int matrix,
                                const float (&across)[2], int lane) {
#pragma unroll
    for (int i = 2; i < 4; ++i) {
        blocks.multiply(d[i], x[0], matrix, 0, i, 0, lane);
        blocks.multiply(d[i], x[1], matrix, 0, i, 1, lane);
#pragma unroll
        for (int e = 0; e < 4; ++e) d[i][e] *= across[e / 2];
    }
#pragma unroll
    for (int first = 0; first < 4; first += 2) {
        blocks.multiply(d[first], x[first], matrix, 0, first, first, lane);
        blocks.multiply(d[first + 1], x[first], matrix, 0, first + 1, first, lane);
        blocks.multiply(d[first + 1], x[first + 1], matrix, 0, first + 1, first + 1, lane);
    }
}

// d_j += sum_i x_i m_ij within the chunks; between_j likewise, i in the second chunk and j in the first.
__device__ inline void add_columns(ChannelTokens& d, float (&between)[2][4], const ChannelTokens& x,
                                   const PairBlocks& blocks, int matrix, int lane) {
#pragma unroll
    for (int first = 0; first < 4; first += 2) {
        blocks.multiply(d[first], x[first], matrix, 1, first, first, lane);
        blocks.multiply(d[first], x[first + 1], matrix, 1, first + 1, first, lane);
        blocks.multiply(d[first + 1], x[first + 1], matrix, 1, first + 1, first + 1, lane);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        blocks.multiply(between[j], x[2], matrix, 1, 2, j, lane);
        blocks.multiply(between[j], x[3], matrix, 1, 3, j, lane);
    }
}
