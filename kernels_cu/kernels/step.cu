// The token recurrence itself, for decoding: a few tokens a sequence, the state read and written once.
//
//   S <- Diag(e^l) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = scale S^T q
//
// In:  q, k [T,H,K], v [T,HV,V], g [T,HV,K], beta [T,HV] raw; A_log [HV], dt_bias [HV,K] float32 or null;
//      initial [sequences,HV,K,V] float32; cu_seqlens [sequences + 1].
// Out: out [T,HV,V]; final [sequences,HV,K,V] float32. Written; final may be initial.
// Grid: one block per (sequence, value head, 32 value columns), the columns fastest; kWarps warps, each with its share
// of the channels: a lane holds one column's. float32 arithmetic, sums over warps in a fixed order.
#include "common/gate.cuh"
#include "ptx/approximate.cuh"
#include "tile/general_element.cuh"
#include "tile/general_operands.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kChannelsPerWarp = kKeySize / kWarps;
constexpr u32 kAllLanes = 0xffffffffu;

// Sum over all channels of a * b, in every lane; each warp computes it alone.
__device__ float dot(const float* a, const float* b) {
    float sum = 0.0f;
    for (int channel = threadIdx.x % 32; channel < kKeySize; channel += 32) sum = fmaf(a[channel], b[channel], sum);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    return sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
step(const Element* q, const Element* k, const Element* v, const Element* g, const Element* beta, const float* A_log,
     const float* dt_bias, const float* initial, const i64* cu_seqlens, int heads, int value_heads, int key_size,
     int value_size, int gate_form, int beta_form, int qk_l2norm, float lower_bound, float scale, Element* out,
     float* final) {
    __shared__ float key[kKeySize], query[kKeySize], decay[kKeySize];
    __shared__ float read_key[kWarps][32], read_query[kWarps][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = (value_size + 31) / 32;
    const int column = blockIdx.x % tiles * 32 + lane;
    const int value_head = blockIdx.x / tiles % value_heads;
    const int sequence = blockIdx.x / tiles / value_heads;
    const int head = value_head / (value_heads / heads);
    const int first_channel = warp * kChannelsPerWarp;
    const i64 place = (static_cast<i64>(sequence) * value_heads + value_head) * key_size * value_size + column;

    float state[kChannelsPerWarp];
#pragma unroll
    for (int i = 0; i < kChannelsPerWarp; ++i) {
        const int channel = first_channel + i;
        const bool real = channel < key_size && column < value_size;
        state[i] = real ? initial[place + static_cast<i64>(channel) * value_size] : 0.0f;
    }

    const float rate = A_log == nullptr ? 1.0f : expf(A_log[value_head]);
    for (i64 token = cu_seqlens[sequence]; token < cu_seqlens[sequence + 1]; ++token) {
        const i64 of_value = token * value_heads + value_head;
        for (int channel = threadIdx.x; channel < kKeySize; channel += kThreads) {
            const bool real = channel < key_size;
            const i64 at = (token * heads + head) * key_size + channel;
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

        const float key_factor = qk_l2norm ? 1.0f / sqrtf(dot(key, key) + kNormEpsilon) : 1.0f;
        const float query_factor = scale * (qk_l2norm ? 1.0f / sqrtf(dot(query, query) + kNormEpsilon) : 1.0f);
        const float key_query = dot(key, query) * key_factor * query_factor;
        float from_key = 0.0f, from_query = 0.0f;
#pragma unroll
        for (int i = 0; i < kChannelsPerWarp; ++i) {
            const int channel = first_channel + i;
            state[i] *= decay[channel];
            from_key = fmaf(state[i], key[channel], from_key);
            from_query = fmaf(state[i], query[channel], from_query);
        }
        read_key[warp][lane] = from_key;
        read_query[warp][lane] = from_query;
        __syncthreads();

        from_key = from_query = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) {
            from_key += read_key[i][lane];
            from_query += read_query[i][lane];
        }
        const float strength = activate_beta(static_cast<BetaForm>(beta_form), to_float(beta[of_value]));
        const i64 at = of_value * value_size + column;
        const float value = column < value_size ? to_float(v[at]) : 0.0f;
        const float u = strength * (value - key_factor * from_key);
        // S^T q after the write is S^T q before it plus (k . q) u.
        if (warp == 0 && column < value_size) from_float(out[at], fmaf(key_query, u, query_factor * from_query));
        const float written = key_factor * u;
#pragma unroll
        for (int i = 0; i < kChannelsPerWarp; ++i) state[i] = fmaf(key[first_channel + i], written, state[i]);
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < kChannelsPerWarp; ++i) {
        const int channel = first_channel + i;
        if (channel < key_size && column < value_size) final[place + static_cast<i64>(channel) * value_size] = state[i];
    }
}
