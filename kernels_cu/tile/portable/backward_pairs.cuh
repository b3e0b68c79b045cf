// One channel of one chunk, in the registers of one thread: how the gradients of the chunk's products reach q, k and
// the log decays.
//
// Decays between two tokens are built as in kernels/prepare.cu: at the level (half size 8, 4, 2, 1) at which token i
// lies in the second and j in the first half of the same block, the exponent is (sum from the middle to i) + (sum from
// after j to the middle). A log decay receives exactly the pairs that span it; the pairs i = j, whose factor is e^0,
// reach no log decay at all, so nothing has to cancel.
#pragma once

#include "common/shape.cuh"
#include "ptx/convert.cuh"

// Floats from row to row of the pair matrices in shared memory; rows are read as float4.
constexpr int kPairStride = kChunk + 4;

// query carries the scale; decay is the log decay in bits (powers of two).
struct ChannelInputs {
    float key[kChunk], query[kChunk], decay[kChunk];
};

// The channel's keys and queries in shared memory, `stride` floats from token to token. Read anew at every use (volatile):
// kept in registers beside the gradients they would cost more in spills than the reads do.
struct ParkedChannel {
    const volatile float* keys;
    const volatile float* queries;
    int stride;

    __device__ float key(int token) const { return keys[token * stride]; }
    __device__ float query(int token) const { return queries[token * stride]; }
};

// Of key, query and the natural log decay.
struct ChannelGradients {
    float key[kChunk], query[kChunk], decay[kChunk];
};

// Starts the gradients with what passes through the states around the chunk: K+ S, Q+ S, Kr dS' and the carried state.
// d_query_in, d_key_in, d_key_out: this channel's column of the gradients of Q+, K+ and Kr, `stride` from token to
// token; d_total: sum over the value columns of S * dS'.
__device__ inline void through_states(const ChannelInputs& x, const float* d_query_in, const float* d_key_in,
                                      const float* d_key_out, int stride, float d_total, ChannelGradients& d) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        sum += x.decay[i];
        const float into = ex2_flushed(sum);
        d.query[i] = into * d_query_in[i * stride];
        d.key[i] = into * d_key_in[i * stride];
        d.decay[i] = x.query[i] * d.query[i] + x.key[i] * d.key[i];
    }
    float after = ex2_flushed(sum) * d_total;
    sum = 0.0f;
    float written[kChunk];
#pragma unroll
    for (int i = kChunk - 1; i >= 0; --i) {
        const float from_key_out = ex2_flushed(sum) * d_key_out[i * stride];
        sum += x.decay[i];
        d.key[i] += from_key_out;
        written[i] = x.key[i] * from_key_out;
        after += d.decay[i];
        d.decay[i] = after;
    }
    float before = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        d.decay[i] += before;
        before += written[i];
    }
}

// Adds the pairs of one level. d_pairs, d_attend: gradients of G and P in shared memory, read below the diagonal only.
template <int kHalf>
__device__ inline void through_level(const ParkedChannel& x, const float (&decay)[kChunk], const float* d_pairs,
                                     const float* d_attend, ChannelGradients& d) {
#pragma unroll
    for (int first = 0; first < kChunk; first += 2 * kHalf) {
        const int middle = first + kHalf;
        float column_decay[kHalf], column[kHalf], d_column[kHalf];
        float sum = 0.0f;
#pragma unroll
        for (int j = kHalf - 1; j >= 0; --j) {
            column_decay[j] = ex2_flushed(sum);
            column[j] = x.key(first + j) * column_decay[j];
            d_column[j] = 0.0f;
            sum += decay[first + j];
        }
        float spanned[kHalf];
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            sum += decay[middle + i];
            const float row_decay = ex2_flushed(sum);
            const float key_row = x.key(middle + i) * row_decay, query_row = x.query(middle + i) * row_decay;
            float d_key_row = 0.0f, d_query_row = 0.0f;
#pragma unroll
            for (int j = 0; j < kHalf; ++j) {
                const float pair = d_pairs[(middle + i) * kPairStride + first + j];
                const float attend = d_attend[(middle + i) * kPairStride + first + j];
                d_key_row = fmaf(pair, column[j], d_key_row);
                d_query_row = fmaf(attend, column[j], d_query_row);
                d_column[j] = fmaf(pair, key_row, fmaf(attend, query_row, d_column[j]));
            }
            d.key[middle + i] = fmaf(row_decay, d_key_row, d.key[middle + i]);
            d.query[middle + i] = fmaf(row_decay, d_query_row, d.query[middle + i]);
            spanned[i] = key_row * d_key_row + query_row * d_query_row;
        }
        sum = 0.0f;
#pragma unroll
        for (int i = kHalf - 1; i >= 0; --i) {
            sum += spanned[i];
            d.decay[middle + i] += sum;
        }
        sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kHalf; ++j) {
            d.decay[first + j] += sum;
            sum = fmaf(column[j], d_column[j], sum);
            d.key[first + j] = fmaf(column_decay[j], d_column[j], d.key[first + j]);
        }
    }
}

// Adds all pairs of the chunk, those of a token with itself included.
__device__ inline void through_pairs(const ParkedChannel& x, const float (&decay)[kChunk], const float* d_pairs,
                                     const float* d_attend, ChannelGradients& d) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        const float own = d_attend[i * kPairStride + i];
        d.query[i] = fmaf(own, x.key(i), d.query[i]);
        d.key[i] = fmaf(own, x.query(i), d.key[i]);
    }
    through_level<8>(x, decay, d_pairs, d_attend, d);
    through_level<4>(x, decay, d_pairs, d_attend, d);
    through_level<2>(x, decay, d_pairs, d_attend, d);
    through_level<1>(x, decay, d_pairs, d_attend, d);
}
