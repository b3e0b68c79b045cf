// A strip of the state, 16 value columns of one head, in the registers of one warp, and what a chunk does to it.
//
// The strip is kept transposed: rows are value columns, so that the state, R and U are A fragments exactly as the
// products leave them and nothing moves between lanes. Row g is the strip's column 2g, row g + 8 its column 2g + 1:
// a lane's two columns are neighbours in memory. Warps never exchange anything.
#pragma once

#include "tile/portable/operands.cuh"
#include "tile/shared/element.cuh"
#include "tile/shared/mma_float32.cuh"

constexpr int kStripColumns = 16;

// Strips, one a warp, that a block of the recurrence works on side by side.
constexpr int kTileWarps = 4;
constexpr int kTileColumns = kTileWarps * kStripColumns;

__device__ inline int tiles_of(int columns) { return (columns + kTileColumns - 1) / kTileColumns; }

// A lane's values of a [token, column] tile of the strip: at [i], columns 2g and 2g + 1 of token strip_token(i).
struct StripRows {
    float2 at[4];
};

__device__ inline int strip_token(int i, int lane) { return 8 * (i / 2) + 2 * (lane % 4) + i % 2; }

// An accumulator pair, one for each half of the chunk, as rows.
__device__ inline StripRows rows_of(const float (&x)[2][4]) {
    StripRows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rows.at[2 * half] = make_float2(x[half][0], x[half][2]);
        rows.at[2 * half + 1] = make_float2(x[half][1], x[half][3]);
    }
    return rows;
}

struct StateStrip {
    // [step]: channels 8 step + 2t and + 1 of column 2g, then of column 2g + 1.
    float s[kKeySize / 8][4];

    // state points at [channel 0, column 0] of the strip, `columns` apart from channel to channel; channels from
    // key_size on and columns from `inside` on are taken as zero.
    __device__ void load(const float* state, int columns, int key_size, int inside) {
        visit([&](float& value, int channel, int column) {
            const bool real = channel < key_size && column < inside;
            value = real ? state[static_cast<i64>(channel) * columns + column] : 0.0f;
        });
    }

    __device__ void store(float* state, int columns, int key_size, int inside) {
        visit([&](float& value, int channel, int column) {
            if (channel < key_size && column < inside) state[static_cast<i64>(channel) * columns + column] = value;
        });
    }

    // Columns first_column.. of the identity; `inside` below 1 makes zeros.
    __device__ void identity(int first_column, int inside) {
        visit([&](float& value, int channel, int column) {
            value = channel == first_column + column && column < inside ? 1.0f : 0.0f;
        });
    }

    // Takes the strip through one chunk: record is its operands in shared memory, v its values (zero past the end).
    // Returns what the tokens write, U. With kOutputs, out is written: scale S^T q of every token.
    template <bool kOutputs>
    __device__ StripRows advance(const float* record, const StripRows& v, StripRows& out) {
        const int lane = threadIdx.x % 32;
        const float4* key_in = reinterpret_cast<const float4*>(record + kKeyIn) + lane;
        const float4* query_in = reinterpret_cast<const float4*>(record + kQueryIn) + lane;
        const float4* key_out = reinterpret_cast<const float4*>(record + kKeyOut) + lane;
        const float4* solve = reinterpret_cast<const float4*>(record + kSolve) + lane;
        const float4* attend = reinterpret_cast<const float4*>(record + kAttend) + lane;

        // [half of the chunk]: K+ S and Q+ S, transposed.
        float x[2][4] = {}, y[2][4] = {};
#pragma unroll
        for (int step = 0; step < kKeySize / 8; ++step) {
            const auto rows = as_rows<kPasses>(s[step][0], s[step][1], s[step][2], s[step][3]);
            const float4 key = key_in[32 * step];
            multiply_add<kPasses>(x[0], rows, key.x, key.y);
            multiply_add<kPasses>(x[1], rows, key.z, key.w);
            if constexpr (kOutputs) {
                const float4 query = query_in[32 * step];
                multiply_add<kPasses>(y[0], rows, query.x, query.y);
                multiply_add<kPasses>(y[1], rows, query.z, query.w);
            }
        }

        // R = V - K+ S, then U = N Diag(beta) R; the upper right block of N is zero.
        float u[2][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 even = v.at[2 * half], odd = v.at[2 * half + 1];
            const auto rows = as_rows<kPasses>(even.x - x[half][0], odd.x - x[half][1], even.y - x[half][2],
                                               odd.y - x[half][3]);
            const float4 columns = solve[32 * half];
            if (half == 0) multiply_add<kPasses>(u[0], rows, columns.x, columns.y);
            multiply_add<kPasses>(u[1], rows, columns.z, columns.w);
        }
        const RowFragment<kPasses> written[2] = {as_rows<kPasses>(u[0][0], u[0][1], u[0][2], u[0][3]),
                                                 as_rows<kPasses>(u[1][0], u[1][1], u[1][2], u[1][3])};

        if constexpr (kOutputs) {
            const float4 first = attend[0], second = attend[32];
            multiply_add<kPasses>(y[0], written[0], first.x, first.y);
            multiply_add<kPasses>(y[1], written[0], first.z, first.w);
            multiply_add<kPasses>(y[1], written[1], second.z, second.w);
            out = rows_of(y);
        }

        // S' = Diag(e^gamma_C) S + Kr^T U.
#pragma unroll
        for (int step = 0; step < kKeySize / 8; ++step) {
            const float2 decay = *reinterpret_cast<const float2*>(record + kDecay + 8 * step + 2 * (lane % 4));
            s[step][0] *= decay.x;
            s[step][1] *= decay.y;
            s[step][2] *= decay.x;
            s[step][3] *= decay.y;
            const float4 key = key_out[32 * step];
            multiply_add<kPasses>(s[step], written[0], key.x, key.y);
            multiply_add<kPasses>(s[step], written[1], key.z, key.w);
        }
        return rows_of(u);
    }

  private:
    template <typename Visitor>
    __device__ void visit(Visitor visitor) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int step = 0; step < kKeySize / 8; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) visitor(s[step][i], 8 * step + 2 * t + i % 2, 2 * g + i / 2);
        }
    }
};
