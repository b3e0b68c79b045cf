// All gradients of the tokens of one chunk, from the states around it.
//
//   dQ+ = dO S^T,  dK+ = -dV S^T,  dKr = U dS'^T,  d total = rowsum(S * dS'),  dP = dO U^T,  dG = -dV U^T
//   then through the decays to q, k and the log decays (tile/portable/backward_pairs.cuh), then through the activations to dq,
//   dk (summed over the value heads of a key head, before the norm) and dg.  dbeta_i = dV_i . U_i / beta_i^2.
//
// In:  q, k [T,H,K], g [T,HV,K], beta [T,HV] raw; A_log [HV], dt_bias [HV,K] float32 or null; d_out [T,HV,V];
//      states, d_states [chunks,HV,kKeySize,columns], writes (U), d_values (dV) [chunks,HV,kChunk,columns] float32,
//      columns = V rounded up to 16 (backward_states.cu, backward_sweep.cu).
// Out: dq, dk [T,H,K], dv [T,HV,V], dg [T,HV,K], dbeta [T,HV], each in the element type; d_bias, d_rate
//      [chunks,HV,K] float32: the chunk's sums of the gradients of dt_bias and, channel by channel, of A_log. Written.
// Grid: one block per (chunk, key head), the head fastest; kKeySize threads. A block takes the head's value heads in
// turn. Products run on the tensor cores, a warp for 32 channels, over tiles of kTile value columns; then every thread
// has one channel. Sums run in a fixed order. Dynamic shared memory: kPassing + 2 * kChannelFloats floats.
#include "common/gate_adjoint.cuh"
#include "common/warp.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "tile/portable/backward_pairs.cuh"
#include "tile/portable/backward_state.cuh"
#include "tile/portable/operands.cuh"
#include "tile/shared/element.cuh"
#include "tile/shared/mma_float32.cuh"
#include "tile/shared/norm.cuh"
#include "varlen/chunk.cuh"

namespace {

constexpr int kThreads = kKeySize;
constexpr int kWarps = kThreads / 32;
constexpr int kTokensPerWarp = kChunk / kWarps;

constexpr int kTile = 64;
// 16 (mod 32): the rows of a float4 fragment load lie in different banks.
constexpr int kTileStride = kTile + 16;
constexpr int kTileFloats = kChunk * kTileStride;
// 8 (mod 32): so do the rows of a float2 accumulator store.
constexpr int kStride = kKeySize + 8;
constexpr int kChannelFloats = kChunk * kStride;

// Shared memory: dO, dV and U of a tile, later dQ+, dK+ and dKr in the same place; then dq and dk.
constexpr int kPassing = 3 * (kTileFloats > kChannelFloats ? kTileFloats : kChannelFloats);

static_assert(kWarps >= 2, "one warp for dP, another for dG");

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

// The gate of one channel over the chunk's tokens, whose gradients go `stride` apart. The form is a constant, so that the
// unrolled loops hold the code of one form each, and only that passes through the instruction cache.
struct ChannelGate {
    GateRate rate;
    float bias, lower_bound;
    int tokens;
    i64 stride;

    // Log decays in bits; 0 past the end.
    template <GateForm kForm>
    __device__ void activate(const float (&raw)[kChunk], float (&decay)[kChunk]) const {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            decay[i] = i < tokens ? log_decay(kForm, raw[i], rate, bias, lower_bound) * kLog2E : 0.0f;
        }
    }

    // Writes dg from the gradients of the log decays; returns the sums over the tokens. raw: in shared memory.
    template <GateForm kForm>
    __device__ GateGradient adjoint(const float (&d)[kChunk], const volatile float* raw, Element* dg) const {
        GateGradient sums{0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            if (i < tokens) {
                const GateGradient one = gate_adjoint(kForm, d[i], raw[i * kStride], rate, bias, lower_bound);
                Element result;
                from_float(result, one.raw);
                *dg = result;
                dg += stride;
                sums.raw += one.raw;
                sums.rate += one.rate;
            }
        }
        return sums;
    }
};

// A lane's channels (lane, lane + 32, ...) of a warp's tokens of q or k, asked for all at once.
struct WarpRows {
    Element at[kTokensPerWarp][kKeySize / 32];

    // rows: [first token, this lane's first channel]; `tokens` of them are real, `inside` channels from there on.
    __device__ WarpRows(const Element* rows, i64 stride, int tokens, int inside) {
        Element zero;
        from_float(zero, 0.0f);
#pragma unroll
        for (int i = 0; i < kTokensPerWarp; ++i) {
#pragma unroll
            for (int j = 0; j < kKeySize / 32; ++j) {
                at[i][j] = i < tokens && 32 * j < inside ? rows[i * stride + 32 * j] : zero;
            }
        }
    }

    __device__ float square(int i) const {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kKeySize / 32; ++j) sum = fmaf(to_float(at[i][j]), to_float(at[i][j]), sum);
        return warp_sum(sum);
    }
};

// The reciprocal norm of a token whose squares overflow, by a warp. row: this lane's first channel of it, of which there
// are `inside` from there on. A function of its own: it is hardly ever called, and registers are scarce.
__device__ __noinline__ float factor_of_large(const Element* row, int inside) {
    float sum = 0.0f;
#pragma unroll 1
    for (int j = 0; j < inside; j += 32) {
        const float x = kShrink * to_float(row[j]);
        sum = fmaf(x, x, sum);
    }
    return kShrink * reciprocal_norm_of_shrunk(warp_sum(sum));
}

__device__ float norm_factor(float square, const Element* row, int inside) {
    return squares_overflow(square) ? factor_of_large(row, inside) : reciprocal_norm(square);
}

__device__ float4 load4(const float* at) { return *reinterpret_cast<const float4*>(at); }

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kThreads == 256 ? 1 : 384 / kThreads)
backward_tokens(const Element* q, const Element* k, const Element* g, const Element* beta, const float* A_log,
                const float* dt_bias, const Element* d_out, const float* states, const float* writes,
                const float* d_states, const float* d_values, const i64* cu_seqlens, const i64* chunk_offsets,
                int sequences, int key_heads, int value_heads, int key_size, int value_size, int gate_form, int beta_form,
                int qk_l2norm, float lower_bound, float scale, Element* dq, Element* dk, Element* dv, Element* dg,
                Element* dbeta, float* d_bias, float* d_rate) {
    extern __shared__ float4 dynamic_shared[];
    float* passing = reinterpret_cast<float*>(dynamic_shared);
    float* d_queries = passing + kPassing;
    float* d_keys = d_queries + kChannelFloats;
    alignas(16) __shared__ float d_attend[kChunk * kPairStride], d_pairs[kChunk * kPairStride];
    __shared__ float query_factor[kChunk], key_factor[kChunk], d_total[kKeySize];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = lane / 4, column = 4 * (lane % 4);
    const int channel = threadIdx.x;
    const bool real_channel = channel < key_size;
    const i64 chunk = blockIdx.x / key_heads;
    const int head = blockIdx.x % key_heads;
    const int group = value_heads / key_heads;
    const int columns = padded_columns(value_size);
    const ChunkPlace place = place_chunk(chunk, chunk_offsets, cu_seqlens, sequences);

    // The norms' factors, a few tokens a warp.
    const i64 key_stride = static_cast<i64>(key_heads) * key_size;
    const i64 of_warp = ((place.token + warp * kTokensPerWarp) * key_heads + head) * key_size + lane;
    const int tokens_of_warp = place.length - warp * kTokensPerWarp;
    {
        const WarpRows queries(q + of_warp, key_stride, tokens_of_warp, key_size - lane);
        const WarpRows keys(k + of_warp, key_stride, tokens_of_warp, key_size - lane);
#pragma unroll
        for (int i = 0; i < kTokensPerWarp; ++i) {
            const i64 row = of_warp + i * key_stride;
            const float of_query = norm_factor(queries.square(i), q + row, key_size - lane);
            const float of_key = norm_factor(keys.square(i), k + row, key_size - lane);
            if (lane == 0) {
                query_factor[warp * kTokensPerWarp + i] = qk_l2norm ? of_query : 1.0f;
                key_factor[warp * kTokensPerWarp + i] = qk_l2norm ? of_key : 1.0f;
            }
        }
    }

    for (int member = 0; member < group; ++member) {
        const int value_head = head * group + member;
        const i64 of_chunk = chunk * value_heads + value_head;
        const float* state = states + (of_chunk * kKeySize + 32 * warp + row) * columns + column;
        const float* d_state = d_states + (of_chunk * kKeySize + 32 * warp + row) * columns + column;

        // [8 channels]: dQ+, -dK+ and dKr of this warp's channels, d total of channel 8n + row, and (warps 0 and 1, by
        // 8 tokens) dP and -dG.
        float d_query_in[4][4] = {}, d_key_in[4][4] = {}, d_key_out[4][4] = {}, total[4] = {};
        float pairs[2][4] = {};
        float strengths[kTokensPerWarp] = {};
        // dO, dV and U of the value columns from `first` on into shared memory; dV goes out on the way. All loads come
        // before the first use of any.
        const auto load_tile = [&](float* tile, int first) {
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
        };
        // The states are read once, a tile of columns at a time; the next tile is on its way meanwhile.
        const auto prefetch_tile = [&](int first) {
            constexpr int kColumnsPerLine = 32;
            for (int i = threadIdx.x; i < kKeySize * (kTile / kColumnsPerLine); i += kThreads) {
                const int at = first + i % (kTile / kColumnsPerLine) * kColumnsPerLine;
                const i64 from = (of_chunk * kKeySize + i / (kTile / kColumnsPerLine)) * columns + at;
                if (at < columns) {
                    prefetch_l2(states + from);
                    prefetch_l2(d_states + from);
                }
            }
        };
        prefetch_tile(0);
        for (int first = 0; first < columns; first += kTile) {
            __syncthreads();
            prefetch_tile(first + kTile);
            load_tile(passing, first);
            __syncthreads();

#pragma unroll
            for (int i = 0; i < kTokensPerWarp; ++i) {
                const float* from = passing + kTileFloats + (warp * kTokensPerWarp + i) * kTileStride + lane;
                strengths[i] = fmaf(from[0], from[kTileFloats], fmaf(from[32], from[kTileFloats + 32], strengths[i]));
            }
            for (int strip = first; strip < first + kTile && strip < columns; strip += kStripColumns) {
                const float* from = passing + row * kTileStride + strip - first + column;
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

        // All of the products into shared memory, where each thread finds its channel.
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            float* into = passing + row * kStride + 32 * warp + 8 * n + column / 2;
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
#pragma unroll
        for (int i = 0; i < kTokensPerWarp; ++i) {
            const int token = warp * kTokensPerWarp + i;
            const float sum = warp_sum(strengths[i]);
            if (lane == 0 && token < place.length) {
                const i64 at = (place.token + token) * value_heads + value_head;
                const float raw = to_float(beta[at]);
                const float strength = activate_beta(static_cast<BetaForm>(beta_form), raw);
                from_float(dbeta[at],
                           beta_adjoint(static_cast<BetaForm>(beta_form), sum / strength, strength, raw));
            }
        }
        __syncthreads();

        // From here on a thread a channel.
        const GateRate rate(A_log == nullptr ? 0.0f : A_log[value_head]);
        const float bias = dt_bias == nullptr || !real_channel ? 0.0f : dt_bias[value_head * key_size + channel];
        const i64 of_gate = (place.token * value_heads + value_head) * key_size + channel;
        const i64 gate_stride = static_cast<i64>(value_heads) * key_size;
        const i64 of_key = (place.token * key_heads + head) * key_size + channel;
        const int tokens = real_channel ? place.length : 0;
        const auto form = static_cast<GateForm>(gate_form);
        ChannelInputs x;
        ChannelGradients d;
        float raw_gate[kChunk];
        {
            const Element* to_key = k + of_key;
            const Element* to_query = q + of_key;
            const Element* to_gate = g + of_gate;
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                x.key[i] = i < tokens ? to_float(*to_key) : 0.0f;
                x.query[i] = i < tokens ? to_float(*to_query) : 0.0f;
                raw_gate[i] = i < tokens ? to_float(*to_gate) : 0.0f;
                to_key += key_stride;
                to_query += key_stride;
                to_gate += gate_stride;
            }
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            x.key[i] *= key_factor[i];
            x.query[i] *= query_factor[i] * scale;
        }
        const ChannelGate gate{rate, bias, lower_bound, tokens, gate_stride};
        if (form == GateForm::kLowerBound) {
            gate.activate<GateForm::kLowerBound>(raw_gate, x.decay);
        } else if (form == GateForm::kSoftplus) {
            gate.activate<GateForm::kSoftplus>(raw_gate, x.decay);
        } else {
            gate.activate<GateForm::kLog>(raw_gate, x.decay);
        }
        through_states(x, passing + channel, passing + kChannelFloats + channel, passing + 2 * kChannelFloats + channel,
                       kStride, d_total[channel], d);
        // The products of this channel are used up; what is needed later takes their place.
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            passing[i * kStride + channel] = x.query[i];
            passing[kChannelFloats + i * kStride + channel] = x.key[i];
            passing[2 * kChannelFloats + i * kStride + channel] = raw_gate[i];
        }
        through_pairs({passing + kChannelFloats + channel, passing + channel, kStride}, x.decay, d_pairs, d_attend, d);

        GateGradient sums;
        if (form == GateForm::kLowerBound) {
            sums = gate.adjoint<GateForm::kLowerBound>(d.decay, passing + 2 * kChannelFloats + channel, dg + of_gate);
        } else if (form == GateForm::kSoftplus) {
            sums = gate.adjoint<GateForm::kSoftplus>(d.decay, passing + 2 * kChannelFloats + channel, dg + of_gate);
        } else {
            sums = gate.adjoint<GateForm::kLog>(d.decay, passing + 2 * kChannelFloats + channel, dg + of_gate);
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            float* to_query = d_queries + i * kStride + channel;
            float* to_key = d_keys + i * kStride + channel;
            *to_query = d.query[i] + (member == 0 ? 0.0f : *to_query);
            *to_key = d.key[i] + (member == 0 ? 0.0f : *to_key);
        }
        if (real_channel) {
            d_bias[of_chunk * key_size + channel] = sums.raw;
            d_rate[of_chunk * key_size + channel] = sums.rate;
        }
    }

    // Through the norm, a few tokens a warp.
    __syncthreads();
    const auto through_norm = [&](const WarpRows& raw, const float* d, const float* factors, float scale, Element* to) {
#pragma unroll
        for (int i = 0; i < kTokensPerWarp; ++i) {
            const int token = warp * kTokensPerWarp + i;
            const float* row = d + token * kStride + lane;
            const float factor = factors[token];
            float along = 0.0f;
#pragma unroll
            for (int j = 0; j < kKeySize / 32; ++j) {
                along = fmaf(to_float(raw.at[i][j]) * factor, row[32 * j] * scale, along);
            }
            along = qk_l2norm ? warp_sum(along) : 0.0f;
#pragma unroll
            for (int j = 0; j < kKeySize / 32; ++j) {
                if (i < tokens_of_warp && 32 * j < key_size - lane) {
                    const float normed = to_float(raw.at[i][j]) * factor, d = row[32 * j] * scale;
                    // Of a single channel 1 - normed^2 is what epsilon leaves, formed without the difference.
                    const bool single = qk_l2norm && key_size == 1;
                    const float across = single ? kNormEpsilon * factor * factor * d : d - normed * along;
                    from_float(to[of_warp + i * key_stride + 32 * j], factor * across);
                }
            }
        }
    };
    const WarpRows queries(q + of_warp, key_stride, tokens_of_warp, key_size - lane);
    const WarpRows keys(k + of_warp, key_stride, tokens_of_warp, key_size - lane);
    through_norm(queries, d_queries, query_factor, scale, dq);
    through_norm(keys, d_keys, key_factor, 1.0f, dk);
}
