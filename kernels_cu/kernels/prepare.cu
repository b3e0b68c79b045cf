// Activations and all products of one chunk of one value head that do not involve the state.
//
//   gamma_i = sum of the log decays of tokens 0..i;   G_ij = k_i . e^(gamma_i - gamma_j) k_j  (j < i)
//   K+ = k e^gamma,  Q+ = scale q e^gamma,  Kr = k e^(gamma_C - gamma),  N = (I + Diag(beta) G)^-1,
//   P_ij = scale q_i . e^(gamma_i - gamma_j) k_j  (j <= i)
//
// In:  q, k [T,H,K], g [T,HV,K], beta [T,HV] raw, contiguous; q may be null (Q+ and P are then zero); A_log [HV] and
//      dt_bias [HV,K] float32 or null.
// Out: records [chunks, HV, kRecord] float32, every float written (tile/general_operands.cuh).
// Grid: one block per (chunk, value head), the head fastest; 128 threads; 3 * kChunk * (kKeySize + 8) floats of dynamic
// shared memory. Blocks are independent of each other.
//
// No exponent is a difference of sums. A pair j < i is handled at the one level (half size 8, 4, 2 or 1) at which i
// lies in the second and j in the first half of the same block: the sum from the block's middle to i and the sum from
// after j to the middle are built by additions only, and both are at most 0. A log decay of -inf or of thousands then
// is exact, and no mask is applied after an exponential.
#include "common/gate.cuh"
#include "ptx/approximate.cuh"
#include "tile/general_element.cuh"
#include "tile/general_mma.cuh"
#include "tile/general_operands.cuh"
#include "varlen/chunk.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kTokensPerWarp = kChunk / kWarps;
constexpr int kChannelsPerLane = kKeySize / 32;
// Eight floats of padding put the rows of a fragment load into different banks.
constexpr int kStride = kKeySize + 8;
constexpr int kSquareStride = kChunk + 1;
constexpr u32 kAllLanes = 0xffffffffu;

__device__ float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
    return x;
}

// The pairs of one level for all blocks of the chunk at once. Row g of the product is the k row, row g + 8 the q row,
// of the g-th second-half token; column n the n-th first-half token.
__device__ void pair_level(int half, const float* keys, const float* queries, const float* decays, float* solve,
                           float* attend) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int place = g % half;
    const int first = 2 * half * (g / half) + place;
    const int second = first + half;
    float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int step = 0; step < kKeySize / 8; ++step) {
        const int channel = 8 * step + 2 * t;
        const float2 key_first = *reinterpret_cast<const float2*>(keys + first * kStride + channel);
        const float2 key_second = *reinterpret_cast<const float2*>(keys + second * kStride + channel);
        const float2 query = *reinterpret_cast<const float2*>(queries + second * kStride + channel);
        float2 before = *reinterpret_cast<const float2*>(decays + second * kStride + channel);
        float2 after = make_float2(0.0f, 0.0f);
        if (place + 1 < half) after = *reinterpret_cast<const float2*>(decays + (first + 1) * kStride + channel);
        // Running sums over the tokens of a half, which sit four lanes apart.
        for (int distance = 1; distance < half; distance *= 2) {
            const float up_x = __shfl_up_sync(kAllLanes, before.x, 4 * distance);
            const float up_y = __shfl_up_sync(kAllLanes, before.y, 4 * distance);
            const float down_x = __shfl_down_sync(kAllLanes, after.x, 4 * distance);
            const float down_y = __shfl_down_sync(kAllLanes, after.y, 4 * distance);
            if (place >= distance) {
                before.x += up_x;
                before.y += up_y;
            }
            if (place + distance < half) {
                after.x += down_x;
                after.y += down_y;
            }
        }
        const float row_x = ex2_flushed(before.x), row_y = ex2_flushed(before.y);
        const auto rows = as_rows<3>(key_second.x * row_x, key_second.y * row_y, query.x * row_x, query.y * row_y);
        multiply_add<3>(product, rows, key_first.x * ex2_flushed(after.x), key_first.y * ex2_flushed(after.y));
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int n = 2 * t + side;
        if (n / half == g / half) {
            const int column = 2 * half * (n / half) + n % half;
            solve[second * kSquareStride + column] = product[side];
            attend[second * kSquareStride + column] = product[2 + side];
        }
    }
}

// Column `column` of (I + Diag(beta) G)^-1 Diag(beta) by forward substitution, over G in place once all have read it.
__device__ void solve_column(int column, const float* pairs, const float* beta, float (&x)[kChunk]) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        float sum = 0.0f;
#pragma unroll
        for (int m = 0; m < i; ++m) sum = fmaf(pairs[i * kSquareStride + m], x[m], sum);
        x[i] = (i == column ? 1.0f : 0.0f) - beta[i] * sum;
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] *= beta[column];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 8)
prepare(const Element* q, const Element* k, const Element* g, const Element* beta, const float* A_log,
        const float* dt_bias, const i64* cu_seqlens, const i64* chunk_offsets, int sequences, int heads,
        int value_heads, int key_size, int gate_form, int beta_form, int qk_l2norm, float lower_bound, float scale,
        float* records) {
    extern __shared__ float4 dynamic_shared[];
    float* keys = reinterpret_cast<float*>(dynamic_shared);
    float* queries = keys + kChunk * kStride;
    float* decays = queries + kChunk * kStride;
    __shared__ float solve[kChunk * kSquareStride], attend[kChunk * kSquareStride], active_beta[kChunk];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 chunk = blockIdx.x / value_heads;
    const int value_head = blockIdx.x % value_heads;
    const int head = value_head / (value_heads / heads);
    const ChunkPlace place = place_chunk(chunk, chunk_offsets, cu_seqlens, sequences);

    for (int i = threadIdx.x; i < kChunk * kSquareStride; i += kThreads) solve[i] = attend[i] = 0.0f;
    __syncthreads();

    // Activate, one token a warp at a time. Tokens past the end and channels past K become zeros with no decay.
    const float rate = A_log == nullptr ? 1.0f : expf(A_log[value_head]);
    for (int i = 0; i < kTokensPerWarp; ++i) {
        const int row = warp * kTokensPerWarp + i;
        const bool real = row < place.length;
        const i64 token = place.token + row;
        float key[kChannelsPerLane], query[kChannelsPerLane];
        float key_square = 0.0f, query_square = 0.0f, key_query = 0.0f;
#pragma unroll
        for (int j = 0; j < kChannelsPerLane; ++j) {
            const int channel = lane + 32 * j;
            const bool inside = real && channel < key_size;
            const i64 at = (token * heads + head) * key_size + channel;
            key[j] = inside ? to_float(k[at]) : 0.0f;
            query[j] = inside && q != nullptr ? to_float(q[at]) : 0.0f;
            key_square = fmaf(key[j], key[j], key_square);
            query_square = fmaf(query[j], query[j], query_square);
            key_query = fmaf(key[j], query[j], key_query);
            float decay = 0.0f;
            if (inside) {
                const float raw = to_float(g[(token * value_heads + value_head) * key_size + channel]);
                const float bias = dt_bias == nullptr ? 0.0f : dt_bias[value_head * key_size + channel];
                decay = log_decay(static_cast<GateForm>(gate_form), raw, rate, bias, lower_bound);
            }
            // From here on decays are in bits: powers of two.
            decays[row * kStride + channel] = decay * kLog2E;
        }
        key_square = warp_sum(key_square);
        query_square = warp_sum(query_square);
        key_query = warp_sum(key_query);
        const float key_factor = qk_l2norm ? 1.0f / sqrtf(key_square + kNormEpsilon) : 1.0f;
        const float query_factor = scale * (qk_l2norm ? 1.0f / sqrtf(query_square + kNormEpsilon) : 1.0f);
#pragma unroll
        for (int j = 0; j < kChannelsPerLane; ++j) {
            keys[row * kStride + lane + 32 * j] = key[j] * key_factor;
            queries[row * kStride + lane + 32 * j] = query[j] * query_factor;
        }
        if (lane == 0) {
            attend[row * kSquareStride + row] = key_query * key_factor * query_factor;
            active_beta[row] = real ? activate_beta(static_cast<BetaForm>(beta_form),
                                                    to_float(beta[token * value_heads + value_head]))
                                    : 0.0f;
        }
    }
    __syncthreads();

    // Pairs: one level a warp.
    static_assert(kChunk >> kWarps == 1);
    pair_level(kChunk / 2 >> warp, keys, queries, decays, solve, attend);
    __syncthreads();

    // The last warp inverts; all others start on the channels, each thread a column of the chunk.
    if (warp == kWarps - 1) {
        float x[kChunk];
        if (lane < kChunk) solve_column(lane, solve, active_beta, x);
        __syncwarp();
        if (lane < kChunk) {
#pragma unroll
            for (int i = 0; i < kChunk; ++i) solve[i * kSquareStride + lane] = x[i];
        }
    }
    float* record = records + static_cast<i64>(blockIdx.x) * kRecord;
    for (int channel = threadIdx.x; channel < kKeySize; channel += kThreads) {
        float key[kChunk], decay[kChunk];
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            const int at = i * kStride + channel;
            key[i] = keys[at];
            decay[i] = decays[at];
            sum += decay[i];
            const float factor = ex2_flushed(sum);
            keys[at] = key[i] * factor;
            queries[at] *= factor;
        }
        record[kDecay + channel] = ex2_flushed(sum);
        sum = 0.0f;
#pragma unroll
        for (int i = kChunk - 1; i >= 0; --i) {
            decays[i * kStride + channel] = key[i] * ex2_flushed(sum);
            sum += decay[i];
        }
    }
    __syncthreads();

    // Write out in fragment order.
    float4* key_in = reinterpret_cast<float4*>(record + kKeyIn);
    float4* query_in = reinterpret_cast<float4*>(record + kQueryIn);
    float4* key_out = reinterpret_cast<float4*>(record + kKeyOut);
    for (int i = threadIdx.x; i < kChunk * kKeySize / 4; i += kThreads) {
        key_in[i] = row_operand(keys, kStride, i / 32, i % 32);
        query_in[i] = row_operand(queries, kStride, i / 32, i % 32);
        key_out[i] = column_operand(decays, kStride, i / 32, i % 32);
    }
    if (threadIdx.x < kChunk * kChunk / 4) {
        reinterpret_cast<float4*>(record + kSolve)[threadIdx.x] = row_operand(solve, kSquareStride, warp, lane);
        reinterpret_cast<float4*>(record + kAttend)[threadIdx.x] = row_operand(attend, kSquareStride, warp, lane);
    }
}
