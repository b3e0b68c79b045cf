// Activations and all products of one chunk of one value head that do not involve the state.
//
//   gamma_i = sum of the log decays of tokens 0..i;   G_ij = k_i . e^(gamma_i - gamma_j) k_j  (j < i)
//   K+ = k e^gamma,  Q+ = scale q e^gamma,  Kr = k e^(gamma_C - gamma),  N = (I + Diag(beta) G)^-1,
//   P_ij = scale q_i . e^(gamma_i - gamma_j) k_j  (j <= i)
//
// In:  q, k [T,H,K], g [T,HV,K], beta [T,HV] raw, contiguous; q may be null (Q+ and P are then zero); A_log [HV] and
//      dt_bias [HV,K] float32 or null.
// Out: records [chunks, HV, kRecord] float32, every float written (tile/portable/operands.cuh).
// Grid: one block per (chunk, value head), the head fastest; 128 threads; 3 * kChunk * (kKeySize + 8) floats of dynamic
// shared memory. Blocks are independent of each other.
//
// No exponent is a difference of sums. A pair j < i is handled at the one level (half size 8, 4, 2 or 1) at which i
// lies in the second and j in the first half of the same block: the sum from the block's middle to i and the sum from
// after j to the middle are built by additions only, and both are at most 0. A log decay of -inf or of thousands then
// is exact, and no mask is applied after an exponential.
#include "common/gate.cuh"
#include "common/warp.cuh"
#include "ptx/convert.cuh"
#include "tile/portable/operands.cuh"
#include "tile/shared/element.cuh"
#include "tile/shared/mma_float32.cuh"
#include "tile/shared/norm.cuh"
#include "varlen/chunk.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kTokensPerWarp = kChunk / kWarps;
constexpr int kChannelsPerLane = kKeySize / 32;
// Eight floats of padding put the rows of a fragment load into different banks.
constexpr int kStride = kKeySize + 8;
constexpr int kSquareStride = kChunk + 1;

// A lane's channels of one token, neighbours in memory.
struct alignas(sizeof(float) * kChannelsPerLane <= 16 ? sizeof(float) * kChannelsPerLane : 16) Channels {
    float at[kChannelsPerLane];
};

// The same as elements.
struct alignas(sizeof(Element) * kChannelsPerLane <= 16 ? sizeof(Element) * kChannelsPerLane : 16) RawChannels {
    Element at[kChannelsPerLane];
};

// Channels from `first` on of a row; zeros from channel `inside` on. `whole` promises that rows are kKeySize long.
__device__ Channels load_channels(const Element* row, int first, int inside, bool whole) {
    Channels channels;
    if (whole && inside > 0) {
        const RawChannels raw = *reinterpret_cast<const RawChannels*>(row + first);
#pragma unroll
        for (int j = 0; j < kChannelsPerLane; ++j) channels.at[j] = to_float(raw.at[j]);
    } else {
#pragma unroll
        for (int j = 0; j < kChannelsPerLane; ++j) channels.at[j] = first + j < inside ? to_float(row[first + j]) : 0.0f;
    }
    return channels;
}

__device__ float dot(const Channels& x, const Channels& y) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kChannelsPerLane; ++j) sum = fmaf(x.at[j], y.at[j], sum);
    return warp_sum(sum);
}

// The reciprocal norm of a token whose squares overflow, by all lanes.
__device__ float factor_of_large(const Channels& x) {
    Channels shrunk;
#pragma unroll
    for (int j = 0; j < kChannelsPerLane; ++j) shrunk.at[j] = kShrink * x.at[j];
    return kShrink * reciprocal_norm_of_shrunk(dot(shrunk, shrunk));
}

// Sums over the first `place + 1` (kUp) or the last `kHalf - place` tokens of a half, which sit four lanes apart.
template <int kHalf, bool kUp>
__device__ float2 running_sum(float2 x, int place) {
#pragma unroll
    for (int distance = 1; distance < kHalf; distance *= 2) {
        const float other_x = kUp ? __shfl_up_sync(kAllLanes, x.x, 4 * distance)
                                  : __shfl_down_sync(kAllLanes, x.x, 4 * distance);
        const float other_y = kUp ? __shfl_up_sync(kAllLanes, x.y, 4 * distance)
                                  : __shfl_down_sync(kAllLanes, x.y, 4 * distance);
        if (kUp ? place >= distance : place + distance < kHalf) {
            x.x += other_x;
            x.y += other_y;
        }
    }
    return x;
}

// The pairs of one level for all blocks of the chunk at once. Row g of the product is the k row, row g + 8 the q row,
// of the g-th second-half token; column n the n-th first-half token.
template <int kHalf>
__device__ void pair_level(const float* keys, const float* queries, const float* decays, float* solve, float* attend) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int place = g % kHalf;
    const int first = 2 * kHalf * (g / kHalf) + place;
    const int second = first + kHalf;
    float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (int step = 0; step < kKeySize / 8; ++step) {
        const int channel = 8 * step + 2 * t;
        const float2 key_first = *reinterpret_cast<const float2*>(keys + first * kStride + channel);
        const float2 key_second = *reinterpret_cast<const float2*>(keys + second * kStride + channel);
        const float2 query = *reinterpret_cast<const float2*>(queries + second * kStride + channel);
        float2 before = *reinterpret_cast<const float2*>(decays + second * kStride + channel);
        float2 after = make_float2(0.0f, 0.0f);
        if (place + 1 < kHalf) after = *reinterpret_cast<const float2*>(decays + (first + 1) * kStride + channel);
        before = running_sum<kHalf, true>(before, place);
        after = running_sum<kHalf, false>(after, place);
        const float row_x = ex2_flushed(before.x), row_y = ex2_flushed(before.y);
        const auto rows = as_rows<3>(key_second.x * row_x, key_second.y * row_y, query.x * row_x, query.y * row_y);
        multiply_add<3>(product, rows, key_first.x * ex2_flushed(after.x), key_first.y * ex2_flushed(after.y));
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int n = 2 * t + side;
        if (n / kHalf == g / kHalf) {
            const int column = 2 * kHalf * (n / kHalf) + n % kHalf;
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

extern "C" __global__ void __launch_bounds__(kThreads, 6)
prepare(const Element* q, const Element* k, const Element* g, const Element* beta, const float* A_log,
        const float* dt_bias, const i64* cu_seqlens, const i64* chunk_offsets, int sequences, int key_heads,
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
    const int head = value_head / (value_heads / key_heads);
    const ChunkPlace place = place_chunk(chunk, chunk_offsets, cu_seqlens, sequences);

    for (int i = threadIdx.x; i < kChunk * kSquareStride; i += kThreads) solve[i] = attend[i] = 0.0f;
    __syncthreads();

    // Activate, two tokens of a warp at a time, a lane holding neighbouring channels. Tokens past the end and channels
    // past K become zeros with no decay.
    const GateRate rate(A_log == nullptr ? 0.0f : A_log[value_head]);
    const int first_channel = lane * kChannelsPerLane;
    float bias[kChannelsPerLane];
#pragma unroll
    for (int j = 0; j < kChannelsPerLane; ++j) {
        const int channel = first_channel + j;
        bias[j] = dt_bias != nullptr && channel < key_size ? dt_bias[value_head * key_size + channel] : 0.0f;
    }
    const auto load = [&](const Element* row, bool real) {
        return load_channels(row, first_channel, real ? key_size : 0, key_size == kKeySize);
    };
#pragma unroll 2
    for (int i = 0; i < kTokensPerWarp; ++i) {
        const int row = warp * kTokensPerWarp + i;
        const bool real = row < place.length;
        const i64 token = place.token + row;
        Channels key = load(k + (token * key_heads + head) * key_size, real);
        Channels query = load(q + (token * key_heads + head) * key_size, real && q != nullptr);
        Channels decay = load(g + (token * value_heads + value_head) * key_size, real);
        float key_square = 0.0f, query_square = 0.0f, key_query = 0.0f;
#pragma unroll
        for (int j = 0; j < kChannelsPerLane; ++j) {
            key_square = fmaf(key.at[j], key.at[j], key_square);
            query_square = fmaf(query.at[j], query.at[j], query_square);
            key_query = fmaf(key.at[j], query.at[j], key_query);
            // From here on decays are in bits: powers of two.
            const float log = kLog2E * log_decay(static_cast<GateForm>(gate_form), decay.at[j], rate, bias[j], lower_bound);
            decay.at[j] = real && first_channel + j < key_size ? log : 0.0f;
        }
        key_square = warp_sum(key_square);
        query_square = warp_sum(query_square);
        key_query = warp_sum(key_query);
        float key_factor = 1.0f, query_factor = scale;
        bool large = false;
        if (qk_l2norm) {
            large = squares_overflow(key_square) || squares_overflow(query_square);
            key_factor = squares_overflow(key_square) ? factor_of_large(key) : reciprocal_norm(key_square);
            query_factor *= squares_overflow(query_square) ? factor_of_large(query) : reciprocal_norm(query_square);
        }
        float own = key_query * key_factor * query_factor;
#pragma unroll
        for (int j = 0; j < kChannelsPerLane; ++j) {
            key.at[j] *= key_factor;
            query.at[j] *= query_factor;
        }
        if (large) own = dot(key, query);
        const int at = row * kStride + first_channel;
        *reinterpret_cast<Channels*>(keys + at) = key;
        *reinterpret_cast<Channels*>(queries + at) = query;
        *reinterpret_cast<Channels*>(decays + at) = decay;
        if (lane == 0) {
            attend[row * kSquareStride + row] = own;
            active_beta[row] = real ? activate_beta(static_cast<BetaForm>(beta_form),
                                                    to_float(beta[token * value_heads + value_head]))
                                    : 0.0f;
        }
    }
    __syncthreads();

    // Pairs: one level a warp.
    static_assert(kChunk == 16 && kWarps == 4);
    switch (warp) {
        case 0: pair_level<8>(keys, queries, decays, solve, attend); break;
        case 1: pair_level<4>(keys, queries, decays, solve, attend); break;
        case 2: pair_level<2>(keys, queries, decays, solve, attend); break;
        case 3: pair_level<1>(keys, queries, decays, solve, attend); break;
    }
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
