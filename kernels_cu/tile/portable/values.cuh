// A warp's 16 columns of a per-token array [T, heads, columns] of elements: v as it is read, the output as it is
// written, in the places where `StateStrip` wants them.
#pragma once

#include "common/shape.cuh"
#include "tile/portable/state.cuh"

template <typename Pointer>  // const Element* or Element*
struct ValueStrip {
    Pointer base;      // [token 0, this head, column 0]
    i64 token_stride;  // elements from token to token
    int columns;       // columns of the array
    int column;        // this lane's first; the second is next to it

    __device__ ValueStrip(Pointer array, int heads, int head, int columns, int first_column)
        : base(array + static_cast<i64>(head) * columns),
          token_stride(static_cast<i64>(heads) * columns),
          columns(columns),
          column(first_column + 2 * (threadIdx.x % 32 / 4)) {}

    // The chunk that starts at `token`; zeros from token `end` and from the array's last column on.
    __device__ StripRows load(i64 token, i64 end) const {
        StripRows rows;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i64 row = token + strip_token(i, threadIdx.x % 32);
            rows.at[i] = make_float2(0.0f, 0.0f);
            if (row < end && column < columns) {
                const Element* from = base + row * token_stride + column;
                if (column + 1 < columns) {
                    rows.at[i] = load_pair(from, columns % 2 == 0);
                } else {
                    rows.at[i].x = to_float(*from);
                }
            }
        }
        return rows;
    }

    __device__ void store(const StripRows& rows, i64 token, i64 end) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i64 row = token + strip_token(i, threadIdx.x % 32);
            if (row < end && column < columns) {
                Element* to = base + row * token_stride + column;
                if (column + 1 < columns) {
                    store_pair(to, rows.at[i], columns % 2 == 0);
                } else {
                    from_float(*to, rows.at[i].x);
                }
            }
        }
    }
};
