// A warp's 16 columns of a per-token array of elements, asked for ahead of their use: nothing waits for memory until the
// values are converted. All lanes load at once, without branches that depend on the data's place.
#pragma once

#include "common/shape.cuh"
#include "tile/portable/state.cuh"
#include "tile/shared/element.cuh"

struct PendingRows {
    ElementPair at[4];

    __device__ StripRows arrived() const {
        StripRows rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.at[i] = make_float2(to_float(at[i].x), to_float(at[i].y));
        return rows;
    }
};

// Places as in ValueStrip (tile/portable/values.cuh).
struct PendingStrip {
    const Element* base;  // [token 0, this head, this lane's first column]
    i64 token_stride;     // elements from token to token
    int inside;           // columns of the array from this lane's first on; none below 1
    bool aligned;         // pairs of columns are aligned

    __device__ PendingStrip(const Element* array, int heads, int head, int columns, int first_column)
        : token_stride(static_cast<i64>(heads) * columns), aligned(columns % 2 == 0) {
        const int column = first_column + 2 * (threadIdx.x % 32 / 4);
        base = array + static_cast<i64>(head) * columns + column;
        inside = columns - column;
    }

    // The chunk that starts at `token`; zeros from token `end` and from the array's last column on.
    __device__ PendingRows load(i64 token, i64 end) const {
        Element zero;
        from_float(zero, 0.0f);
        PendingRows rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.at[i] = {zero, zero};
        const int left = end - token < kChunk ? static_cast<int>(end - token) : kChunk;
        const Element* from = base + token * token_stride;
        if (aligned) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = strip_token(i, threadIdx.x % 32);
                if (row < left && inside > 1) {
                    rows.at[i] = *reinterpret_cast<const ElementPair*>(from + row * token_stride);
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = strip_token(i, threadIdx.x % 32);
                if (row < left && inside > 0) rows.at[i].x = from[row * token_stride];
                if (row < left && inside > 1) rows.at[i].y = from[row * token_stride + 1];
            }
        }
        return rows;
    }
};
