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
#include "common/warp.cuh"
#include "tile/portable/backward_pairs.cuh"
#include "tile/portable/backward_state.cuh"
#include "tile/portable/channel_gate.cuh"
#include "tile/portable/token_block.cuh"
#include "tile/portable/token_norm.cuh"
#include "tile/portable/token_products.cuh"
#include "tile/shared/element.cuh"
#include "varlen/chunk.cuh"

namespace {

// The channel's tokens in registers: keys and queries with the norm, queries with the scale too; raw gates beside.
__device__ void load_channel(const TokenBlock& block, const Element* q, const Element* k, const Element* g, i64 gate_stride,
                             int tokens, const float* query_factor, const float* key_factor, float scale, ChannelInputs& x,
                             float (&raw_gate)[kChunk]) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        x.key[i] = i < tokens ? to_float(*k) : 0.0f;
        x.query[i] = i < tokens ? to_float(*q) : 0.0f;
        raw_gate[i] = i < tokens ? to_float(*g) : 0.0f;
        k += block.key_stride();
        q += block.key_stride();
        g += gate_stride;
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        x.key[i] *= key_factor[i];
        x.query[i] *= query_factor[i] * scale;
    }
}

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

    const int channel = threadIdx.x;
    const bool real_channel = channel < key_size;
    const int group = value_heads / key_heads;
    const i64 chunk = blockIdx.x / key_heads;
    const TokenBlock block = {place_chunk(chunk, chunk_offsets, cu_seqlens, sequences), chunk,
                              static_cast<int>(blockIdx.x % key_heads), key_heads, value_heads, key_size, value_size};
    {
        const WarpRows queries(q + block.of_warp(), block.key_stride(), block.tokens_of_warp(), block.inside());
        const WarpRows keys(k + block.of_warp(), block.key_stride(), block.tokens_of_warp(), block.inside());
        put_norm_factors(block, queries, q, qk_l2norm, query_factor);
        put_norm_factors(block, keys, k, qk_l2norm, key_factor);
    }

    for (int member = 0; member < group; ++member) {
        const int value_head = block.head * group + member;
        const i64 of_chunk = chunk * value_heads + value_head;
        {
            TokenProducts products;
            products.multiply(block, {d_out, dv, states, d_states, writes, d_values, of_chunk, value_head,
                                      padded_columns(value_size)}, passing);
            __syncthreads();
            products.store(block, passing, d_total, d_attend, d_pairs);
            products.put_strengths(block, value_head, beta, static_cast<BetaForm>(beta_form), dbeta);
        }
        __syncthreads();

        // From here on a thread a channel.
        const auto form = static_cast<GateForm>(gate_form);
        const i64 of_gate = (block.place.token * value_heads + value_head) * key_size + channel;
        const i64 of_key = (block.place.token * key_heads + block.head) * key_size + channel;
        const ChannelGate gate{GateRate(A_log == nullptr ? 0.0f : A_log[value_head]),
                               dt_bias == nullptr || !real_channel ? 0.0f : dt_bias[value_head * key_size + channel],
                               lower_bound, real_channel ? block.place.length : 0,
                               static_cast<i64>(value_heads) * key_size};
        ChannelInputs x;
        ChannelGradients d;
        float raw_gate[kChunk];
        load_channel(block, q + of_key, k + of_key, g + of_gate, gate.stride, gate.tokens, query_factor, key_factor, scale,
                     x, raw_gate);
        gate.activate(form, raw_gate, x.decay);
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
        const GateGradient sums = gate.adjoint(form, d.decay, passing + 2 * kChannelFloats + channel, dg + of_gate);
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

    __syncthreads();
    const WarpRows queries(q + block.of_warp(), block.key_stride(), block.tokens_of_warp(), block.inside());
    const WarpRows keys(k + block.of_warp(), block.key_stride(), block.tokens_of_warp(), block.inside());
    put_through_norm(block, queries, d_queries, query_factor, scale, qk_l2norm, dq);
    put_through_norm(block, keys, d_keys, key_factor, 1.0f, qk_l2norm, dk);
}
