// The products of backward_tokens.cu with the value columns, on the tensor cores: a warp has 32 channels.
#pragma once

#include "common/gate_adjoint.cuh"
#include "common/warp.cuh"
#include "ptx/copy.cuh"
#include "tile/portable/backward_pairs.cuh"
#include "tile/portable/backward_state.cuh"
#include "tile/portable/token_block.cuh"
#include "tile/shared/element.cuh"
#include "tile/shared/mma_float32.cuh"

__device__ inline float4 load4(const float* at) { return *reinterpret_cast<const float4*>(at); }

// Four neighbours in memory.
struct alignas(4 * sizeof(Element)) ElementQuad {
    Element at[4];
};

// The fragments of two steps of the product over 16 columns, from row g (x) and row g + 8 (y) at columns 4t..4t + 3.
struct StripFragments {
    RowFragment<kPasses> step[2];

    __device__ StripFragments(float4 x, float4 y)
        : step{as_rows<kPasses>(x.x, x.y, y.x, y.y), as_rows<kPasses>(x.z, x.w, y.z, y.w)} {}

    // d += rows B, B's column g at columns 4t..4t + 3 being b.
    __device__ void multiply(float (&d)[4], float4 b) const {
        multiply_add<kPasses>(d, step[0], stored_operand(b.x), stored_operand(b.y));
        multiply_add<kPasses>(d, step[1], stored_operand(b.z), stored_operand(b.w));
    }
};

// One value head's rows in global memory.
struct TokenValues {
    const Element* d_out;
    Element* dv;
    const float *states, *d_states, *writes, *d_values;
    i64 of_chunk;  // the chunk and head, of those
    int value_head, columns;

    // dO, dV and U of the value columns from `first` on into shared memory; dV goes out on the way. All loads come before
    // the first use of any.
    __device__ void load_tile(const TokenBlock& block, float* tile, int first) const {
        const ChunkPlace& place = block.place;
        const int value_size = block.value_size, value_heads = block.value_heads;
        constexpr int kQuads = kChunk * kTile / 4 / kThreads;
        const bool whole = value_size % 4 == 0;
        const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        Element zero;
        from_float(zero, 0.0f);
        float4 value[kQuads], written[kQuads];
        ElementQuad out[kQuads];
        const auto token_of = [&](int i) { return (threadIdx.x + i * kThreads) / (kTile / 4); };
        const int at = first + 4 * (threadIdx.x % (kTile / 4));
        const i64 of_token = (place.token * value_heads + value_head) * value_size + at;
        const i64 token_stride = static_cast<i64>(value_heads) * value_size;
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const i64 from = (of_chunk * kChunk + token_of(i)) * columns + at;
            value[i] = at < columns ? load4(d_values + from) : zeros;
            written[i] = at < columns ? load4(writes + from) : zeros;
        }
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const Element* from = d_out + of_token + token_of(i) * token_stride;
            out[i] = {{zero, zero, zero, zero}};
            if (whole) {
                if (token_of(i) < place.length && at < value_size) {
                    out[i] = *reinterpret_cast<const ElementQuad*>(from);
                }
            } else {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    if (token_of(i) < place.length && at + c < value_size) out[i].at[c] = from[c];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            float* into = tile + token_of(i) * kTileStride + at - first;
            const ElementQuad& x = out[i];
            *reinterpret_cast<float4*>(into) =
                make_float4(to_float(x.at[0]), to_float(x.at[1]), to_float(x.at[2]), to_float(x.at[3]));
            *reinterpret_cast<float4*>(into + kTileFloats) = value[i];
            *reinterpret_cast<float4*>(into + 2 * kTileFloats) = written[i];
            ElementQuad rounded;
            from_float(rounded.at[0], value[i].x);
            from_float(rounded.at[1], value[i].y);
            from_float(rounded.at[2], value[i].z);
            from_float(rounded.at[3], value[i].w);
            Element* to = dv + of_token + token_of(i) * token_stride;
            if (token_of(i) < place.length) {
                if (whole) {
                    if (at < value_size) *reinterpret_cast<ElementQuad*>(to) = rounded;
                } else {
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        if (at + c < value_size) to[c] = rounded.at[c];
                    }
                }
            }
        }
    }

    // The states are read once, a tile of columns at a time; the next tile is on its way meanwhile.
    __device__ void prefetch_tile(int first) const {
        constexpr int kColumnsPerLine = 32;
        for (int i = threadIdx.x; i < kKeySize * (kTile / kColumnsPerLine); i += kThreads) {
            const int at = first + i % (kTile / kColumnsPerLine) * kColumnsPerLine;
            const i64 from = (of_chunk * kKeySize + i / (kTile / kColumnsPerLine)) * columns + at;
            if (at < columns) {
                prefetch_l2(states + from);
                prefetch_l2(d_states + from);
            }
        }
    }
};

// Of the warp's channels, [8 channels]: dQ+, -dK+ and dKr, d total of channel 8n + row, and (warps 0 and 1, by 8 tokens) dP
// and -dG.
struct TokenProducts {
    float d_query_in[4][4] = {}, d_key_in[4][4] = {}, d_key_out[4][4] = {}, total[4] = {};
    float pairs[2][4] = {};
    float strengths[kTokensPerWarp] = {};  // dV . U of the warp's tokens, a part of every lane

    // tile: shared memory, kPassing floats. The whole block takes part and synchronises.
    __device__ void multiply(const TokenBlock& block, const TokenValues& from_values, float* tile) {
        const int lane = block.lane, warp = block.warp, row = lane / 4, column = 4 * (lane % 4);
        const int columns = from_values.columns;
        const i64 of_channel = (from_values.of_chunk * kKeySize + 32 * warp + row) * columns + column;
        const float* state = from_values.states + of_channel;
        const float* d_state = from_values.d_states + of_channel;
        from_values.prefetch_tile(0);
        for (int first = 0; first < columns; first += kTile) {
            __syncthreads();
            from_values.prefetch_tile(first + kTile);
            from_values.load_tile(block, tile, first);
            __syncthreads();

#pragma unroll
            for (int i = 0; i < kTokensPerWarp; ++i) {
                const float* from = tile + kTileFloats + (warp * kTokensPerWarp + i) * kTileStride + lane;
                strengths[i] = fmaf(from[0], from[kTileFloats], fmaf(from[32], from[kTileFloats + 32], strengths[i]));
            }
            for (int strip = first; strip < first + kTile && strip < columns; strip += kStripColumns) {
                const float* from = tile + row * kTileStride + strip - first + column;
                const float* below = from + 8 * kTileStride;
                const StripFragments out(load4(from), load4(below));
                const StripFragments value(load4(from + kTileFloats), load4(below + kTileFloats));
                const float4 upper = load4(from + 2 * kTileFloats), lower = load4(below + 2 * kTileFloats);
                const StripFragments written(upper, lower);
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const float4 s = load4(state + 8 * n * columns + strip);
                    const float4 d = load4(d_state + 8 * n * columns + strip);
                    out.multiply(d_query_in[n], s);
                    value.multiply(d_key_in[n], s);
                    written.multiply(d_key_out[n], d);
                    total[n] = fmaf(s.x, d.x, fmaf(s.y, d.y, fmaf(s.z, d.z, fmaf(s.w, d.w, total[n]))));
                }
                if (warp == 0) {
                    out.multiply(pairs[0], upper);
                    out.multiply(pairs[1], lower);
                } else if (warp == 1) {
                    value.multiply(pairs[0], upper);
                    value.multiply(pairs[1], lower);
                }
            }
        }
    }

    // All of the products into shared memory, where each thread finds its channel: tiles of kChannelFloats from `products` on;
    // the matrices with kPairStride floats from row to row. The tile that they were made of is no longer needed.
    __device__ void store(const TokenBlock& block, float* products, float* d_total, float* d_attend, float* d_pairs) {
        const int lane = block.lane, warp = block.warp, row = lane / 4, column = 4 * (lane % 4);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            float* into = products + row * kStride + 32 * warp + 8 * n + column / 2;
            const auto store = [&](int tile, float x, float y, float z, float w) {
                *reinterpret_cast<float2*>(into + tile * kChannelFloats) = make_float2(x, y);
                *reinterpret_cast<float2*>(into + tile * kChannelFloats + 8 * kStride) = make_float2(z, w);
            };
            store(0, d_query_in[n][0], d_query_in[n][1], d_query_in[n][2], d_query_in[n][3]);
            store(1, -d_key_in[n][0], -d_key_in[n][1], -d_key_in[n][2], -d_key_in[n][3]);
            store(2, d_key_out[n][0], d_key_out[n][1], d_key_out[n][2], d_key_out[n][3]);
            total[n] += __shfl_xor_sync(kAllLanes, total[n], 1);
            total[n] += __shfl_xor_sync(kAllLanes, total[n], 2);
            if (lane % 4 == 0) d_total[32 * warp + 8 * n + row] = total[n];
        }
        if (warp < 2) {
            float* matrix = warp == 0 ? d_attend : d_pairs;
            const float sign = warp == 0 ? 1.0f : -1.0f;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    matrix[(row + 8 * (i / 2)) * kPairStride + 8 * n + column / 2 + i % 2] = sign * pairs[n][i];
                }
            }
        }
    }

    // dbeta of the warp's tokens.
    __device__ void put_strengths(const TokenBlock& block, int value_head, const Element* beta, BetaForm form,
                                  Element* dbeta) const {
#pragma unroll
        for (int i = 0; i < kTokensPerWarp; ++i) {
            const int token = block.warp * kTokensPerWarp + i;
            const float sum = warp_sum(strengths[i]);
            if (block.lane == 0 && token < block.place.length) {
                const i64 at = (block.place.token + token) * block.value_heads + value_head;
                const float raw = to_float(beta[at]);
                const float strength = activate_beta(form, raw);
                from_float(dbeta[at], beta_adjoint(form, sum / strength, strength, raw));
            }
        }
    }
};
