// What the backward does with strips of a state (tile/portable/state.cuh): it keeps the state around every chunk, and
// takes the gradient of the state through a chunk, from its end to its start.
//
// Kept arrays are padded, so no access needs a bound: states [chunks, HV, kKeySize, columns], token rows
// [chunks, HV, kChunk, columns], columns being V rounded up to whole strips. Padding holds zeros.
#pragma once

#include "tile/portable/backward_pipe.cuh"
#include "tile/portable/state.cuh"

__device__ inline int padded_columns(int columns) {
    return (columns + kStripColumns - 1) / kStripColumns * kStripColumns;
}

// kept points at [channel 0, column 0] of the strip.
__device__ inline void keep_state(const StateStrip& state, float* kept, int columns) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* at = kept + 2 * t * columns + 2 * g;
#pragma unroll
    for (int step = 0; step < kKeySize / 8; ++step) {
        const auto& s = state.s[step];
        *reinterpret_cast<float2*>(at + 8 * step * columns) = make_float2(s[0], s[2]);
        *reinterpret_cast<float2*>(at + (8 * step + 1) * columns) = make_float2(s[1], s[3]);
    }
}

// kept points at [token 0, column 0] of the strip.
__device__ inline void keep_rows(const StripRows& rows, float* kept, int columns) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<float2*>(kept + strip_token(i, lane) * columns + 2 * (lane / 4)) = rows.at[i];
    }
}

// Half a chunk of rows as an A fragment, and an accumulator pair as rows.
__device__ inline RowFragment<kPasses> fragment_of(const StripRows& rows, int half) {
    const float2 even = rows.at[2 * half], odd = rows.at[2 * half + 1];
    return as_rows<kPasses>(even.x, odd.x, even.y, odd.y);
}

// Takes the gradient of the outgoing state to that of the incoming one, in place:
//   dU = P^T dO + Kr dS';  dV = (N Diag(beta))^T dU;  dS = Diag(e^gamma_C) dS' + Q+^T dO - K+^T dV
// chunk: the turned operands; d_out: the strip's columns of dO, zero past the end. Returns dV.
__device__ inline StripRows take_back(StateStrip& d_state, const TurnedChunk& chunk, const StripRows& d_out) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const RowFragment<kPasses> out[2] = {fragment_of(d_out, 0), fragment_of(d_out, 1)};

    // A square matrix's block [rows of half r, columns of half c], transposed, as the second factor of a product.
    const auto multiply_transposed = [&](float (&x)[4], const RowFragment<kPasses>& rows, const float* square, int r,
                                         int c) {
        const float* at = square + (8 * r + 2 * t) * kSquareStride + 8 * c + g;
        multiply_add<kPasses>(x, rows, at[0], at[kSquareStride]);
    };

    // P and N are lower triangular: their upper right blocks are zero.
    float du[2][4] = {};
    multiply_transposed(du[0], out[0], chunk.attend, 0, 0);
    multiply_transposed(du[0], out[1], chunk.attend, 1, 0);
    multiply_transposed(du[1], out[1], chunk.attend, 1, 1);
#pragma unroll
    for (int step = 0; step < kKeySize / 8; ++step) {
        const auto& s = d_state.s[step];
        const auto rows = as_rows<kPasses>(s[0], s[1], s[2], s[3]);
        const float* key = chunk.key_out + g * kKeyOutStride + 8 * step + 2 * t;
        const float2 first = *reinterpret_cast<const float2*>(key);
        const float2 second = *reinterpret_cast<const float2*>(key + 8 * kKeyOutStride);
        multiply_add<kPasses>(du[0], rows, first.x, first.y);
        multiply_add<kPasses>(du[1], rows, second.x, second.y);
    }

    const RowFragment<kPasses> written[2] = {as_rows<kPasses>(du[0][0], du[0][1], du[0][2], du[0][3]),
                                             as_rows<kPasses>(du[1][0], du[1][1], du[1][2], du[1][3])};
    float dv[2][4] = {};
    multiply_transposed(dv[0], written[0], chunk.solve, 0, 0);
    multiply_transposed(dv[0], written[1], chunk.solve, 1, 0);
    multiply_transposed(dv[1], written[1], chunk.solve, 1, 1);

    const RowFragment<kPasses> taken[2] = {as_rows<kPasses>(-dv[0][0], -dv[0][1], -dv[0][2], -dv[0][3]),
                                           as_rows<kPasses>(-dv[1][0], -dv[1][1], -dv[1][2], -dv[1][3])};
#pragma unroll
    for (int step = 0; step < kKeySize / 8; ++step) {
        auto& s = d_state.s[step];
        const float2 decay = *reinterpret_cast<const float2*>(chunk.decay + 8 * step + 2 * t);
        s[0] *= decay.x;
        s[1] *= decay.y;
        s[2] *= decay.x;
        s[3] *= decay.y;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = (8 * half + 2 * t) * kKeyInStride + 8 * step + g;
            multiply_add<kPasses>(s, out[half], chunk.query_in[at], chunk.query_in[at + kKeyInStride]);
            multiply_add<kPasses>(s, taken[half], chunk.key_in[at], chunk.key_in[at + kKeyInStride]);
        }
    }
    return rows_of(dv);
}
