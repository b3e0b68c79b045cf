// The token recurrence itself, for decoding: a few tokens a sequence, the state read and written once.
//
//   S <- Diag(e^l) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q
//
// In:  q, k [T,H,K], v [T,HV,V], g [T,HV,K], beta [T,HV] raw; A_log [HV], dt_bias [HV,K] float32 or null;
//      initial [sequences,HV,K,V] float32; cu_seqlens [sequences + 1].
// Out: out [T,HV,V]; final [sequences,HV,K,V] float32. Written; final may be initial.
// Grid: one block per (sequence, value head, kColumns value columns), the columns fastest; kWarps warps, each with
// kChannelsPerWarp channels: a lane holds kStrips columns, 32 apart. float32 arithmetic, sums over warps in a fixed order.
#include "common/gate.cuh"
#include "common/warp.cuh"
#include "ptx/convert.cuh"
#include "tile/portable/operands.cuh"
#include "tile/shared/element.cuh"
#include "tile/shared/norm.cuh"

namespace {

// A thread asks for 64 values of the state at once, and two blocks of 128 channels fill a multiprocessor's registers:
// enough is under way to keep the memory busy.
constexpr int kChannelsPerWarp = 16;
constexpr int kWarps = kKeySize / kChannelsPerWarp;
constexpr int kThreads = 32 * kWarps;
constexpr int kStrips = 4;
constexpr int kColumns = 32 * kStrips;

// Sum over all channels of a * b, in every lane; each warp computes it alone.
__device__ float dot(const float* a, const float* b) {
    float sum = 0.0f;
    for (int channel = threadIdx.x % 32; channel < kKeySize; channel += 32) sum = fmaf(a[channel], b[channel], sum);
    return warp_sum(sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 512 / kThreads)
step(const Element* q, const Element* k, const Element* v, const Element* g, const Element* beta, const float* A_log,
     const float* dt_bias, const float* initial, const i64* cu_seqlens, int key_heads, int value_heads, int key_size,
     int value_size, int gate_form, int beta_form, int qk_l2norm, float lower_bound, float scale, Element* out,
     float* final) {
    __shared__ float key[kKeySize], query[kKeySize], decay[kKeySize];
    __shared__ float read_key[kWarps][kColumns], read_query[kWarps][kColumns];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = (value_size + kColumns - 1) / kColumns;
    const int first_column = blockIdx.x % tiles * kColumns + lane;
    const int value_head = blockIdx.x / tiles % value_heads;
    const int sequence = blockIdx.x / tiles / value_heads;
    const int head = value_head / (value_heads / key_heads);
    const int first_channel = warp * kChannelsPerWarp;
    const i64 place = (static_cast<i64>(sequence) * value_heads + value_head) * key_size * value_size + first_column;
    const auto real_column = [&](int strip) { return first_column + 32 * strip < value_size; };
    float state[kChannelsPerWarp][kStrips] = {};
#pragma unroll
    for (int i = 0; i < kChannelsPerWarp; ++i) {
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) {
            if (first_channel + i < key_size && real_column(strip)) {
                state[i][strip] = initial[place + static_cast<i64>(first_channel + i) * value_size + 32 * strip];
            }
        }
    }

    const GateRate rate(A_log == nullptr ? 0.0f : A_log[value_head]);
    for (i64 token = cu_seqlens[sequence]; token < cu_seqlens[sequence + 1]; ++token) {
        const i64 of_value = token * value_heads + value_head;
        // Asked for before anything waits.
        const float raw_beta = to_float(beta[of_value]);
        float value[kStrips];
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) {
            value[strip] = real_column(strip) ? to_float(v[of_value * value_size + first_column + 32 * strip]) : 0.0f;
        }
        for (int channel = threadIdx.x; channel < kKeySize; channel += kThreads) {
            const bool real = channel < key_size;
            const i64 at = (token * key_heads + head) * key_size + channel;
            key[channel] = real ? to_float(k[at]) : 0.0f;
            query[channel] = real ? to_float(q[at]) : 0.0f;
            float log = 0.0f;
            if (real) {
                const float bias = dt_bias == nullptr ? 0.0f : dt_bias[value_head * key_size + channel];
                log = log_decay(static_cast<GateForm>(gate_form), to_float(g[of_value * key_size + channel]), rate,
                                bias, lower_bound);
            }
            decay[channel] = ex2_flushed(log * kLog2E);
        }
        __syncthreads();

        float key_factor = 1.0f, query_factor = scale;
        if (qk_l2norm) {
            const float key_square = dot(key, key), query_square = dot(query, query);
            const bool large_key = squares_overflow(key_square), large_query = squares_overflow(query_square);
            key_factor = reciprocal_norm(key_square);
            query_factor = scale * reciprocal_norm(query_square);
            // Alike in all warps: each has the same sums.
            if (large_key || large_query) {
                __syncthreads();
                for (int channel = threadIdx.x; channel < kKeySize; channel += kThreads) {
                    if (large_key) key[channel] *= kShrink;
                    if (large_query) query[channel] *= kShrink;
                }
                __syncthreads();
                if (large_key) key_factor = reciprocal_norm_of_shrunk(dot(key, key));
                if (large_query) query_factor = scale * reciprocal_norm_of_shrunk(dot(query, query));
            }
        }
        const float key_query = dot(key, query) * key_factor * query_factor;
        float from_key[kStrips] = {}, from_query[kStrips] = {};
#pragma unroll
        for (int i = 0; i < kChannelsPerWarp; ++i) {
            const int channel = first_channel + i;
#pragma unroll
            for (int strip = 0; strip < kStrips; ++strip) {
                float& x = state[i][strip];
                x *= decay[channel];
                from_key[strip] = fmaf(x, key[channel], from_key[strip]);
                from_query[strip] = fmaf(x, query[channel], from_query[strip]);
            }
        }
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) {
            read_key[warp][32 * strip + lane] = from_key[strip];
            read_query[warp][32 * strip + lane] = from_query[strip];
        }
        __syncthreads();

        const float strength = activate_beta(static_cast<BetaForm>(beta_form), raw_beta);
        float written[kStrips];
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) {
            float key_sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kWarps; ++i) key_sum += read_key[i][32 * strip + lane];
            const float u = strength * (value[strip] - key_factor * key_sum);
            written[strip] = key_factor * u;
            // The strips' outputs are dealt to the warps.
            if (warp == strip % kWarps && real_column(strip)) {
                float query_sum = 0.0f;
#pragma unroll
                for (int i = 0; i < kWarps; ++i) query_sum += read_query[i][32 * strip + lane];
                // S^T q after the write is S^T q before it plus (k . q) u.
                from_float(out[of_value * value_size + first_column + 32 * strip],
                           fmaf(key_query, u, query_factor * query_sum));
            }
        }
#pragma unroll
        for (int i = 0; i < kChannelsPerWarp; ++i) {
#pragma unroll
            for (int strip = 0; strip < kStrips; ++strip) {
                state[i][strip] = fmaf(key[first_channel + i], written[strip], state[i][strip]);
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < kChannelsPerWarp; ++i) {
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) {
            if (first_channel + i < key_size && real_column(strip)) {
                final[place + static_cast<i64>(first_channel + i) * value_size + 32 * strip] = state[i][strip];
            }
        }
    }
}
