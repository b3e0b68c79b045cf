// How far the tokens of one sequence let a state decay, and what they add to its norm; but for the samples, bounds that
// are proofs.
//
//   m = max_d l_d + log max(1, |1 - beta ||k||^2|): one token's map has norm at most e^m      (l: log decay)
//
// and with k and q after their norm:
//
//   kBounds         logs = sum of m over the tokens of a row
//   kState          that, and added = sum over t of e^(sum of m behind t in the row) |beta_t| ||k_t|| ||v_t||
//   kGradient       that, and added = sum over t of e^(sum of m in the row up to t, t with it) ||q_t|| ||v_t||
//   kSampledLast,   logs = sum over the chunks of a row of their tokens * max_d l_d of their last
//   kSampledFirst                                                                     (first) token
//
// In:  q, k [T,H,K], v [T,HV,V] (kGradient: the output's gradient), g [T,HV,K], beta [T,HV], raw, contiguous, 16-byte
//      aligned; k and beta null: no token's map expands; what a quantity does not name may be null; A_log [HV],
//      dt_bias [HV,K] float32 or null. A row is `chunks_per_row` chunks, the last may be short.
// Out: logs [rows,HV], added [rows,HV] float64, written; added only by kState and kGradient, may be null otherwise.
// Grid: one warp for each row and value head, the head fastest, 8 warps a block. Warps are independent of each other.
//
// A half warp reads one token at a time, 16 bytes a lane where the row's length allows it. The log decay of the slowest
// channel is that of the least argument of the gate, found in float32 rounded downwards, which raises the log decay;
// squares are summed in float32 rounded upwards, which raises norms and with them m. All that follows is float64, one
// token a lane, in a fixed order; what it may lose is far below kAbove, by which every term of a bound is raised. A sum
// of squares beyond float32 makes a bound infinite or NaN, which certifies nothing.
#include "common/shape.cuh"
#include "common/warp.cuh"
#include "tile/shared/decay_bound.cuh"
#include "tile/shared/element.cuh"
#include "tile/shared/norm.cuh"

namespace {

enum class Quantity : int { kBounds = 0, kState = 1, kGradient = 2, kSampledLast = 3, kSampledFirst = 4 };

constexpr int kWarps = 8;
constexpr int kHalf = 16;
static_assert(kChunk == kHalf, "one lane of a half warp a token");
// Tokens whose rows a half warp has under way at a time.
constexpr int kTogether = 4;
constexpr int kVector = 16 / sizeof(Element);

template <int kWidth>
struct alignas(sizeof(Element) * kWidth) Channels {
    Element at[kWidth];
};

// Rows of one chunk: `first` is that of its first token, `stride` elements from token to token, `size` elements each.
struct Rows {
    const Element* first;
    i64 stride;
    int size;
};

// The least gate argument of a token. bias: dt_bias of the head or null.
struct Least : LeastArgument {
    const float* bias;

    __device__ Least(GateForm form, const float* bias) : LeastArgument{form}, bias(bias) {}
    __device__ float shift(int channel) const { return bias != nullptr ? bias[channel] : 0.0f; }
};

// The sum of squares of a token, or a little more.
struct Squares {
    __device__ static float none() { return 0.0f; }
    __device__ static float combine(float x, float y) { return __fadd_ru(x, y); }
    __device__ static float shift(int) { return 0.0f; }
    __device__ static float fold(float sum, float x, float) { return __fmaf_ru(x, x, sum); }
};

// What is wanted of this lane's token, which is that of its place in the half warp. What is behind
// the chunk's last token repeats it.
template <int kWidth, typename What>
__device__ float of_own_token(const Rows& rows, int length, const What& what) {
    const int lane = threadIdx.x % 32, half = lane / kHalf, own = lane % kHalf;
    float found = What::none();
#pragma unroll 1
    for (int first = 0; first < kChunk; first += 2 * kTogether) {
        // The halves take turns: a token's parity is that of the half that reads it.
        float part[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) part[i] = What::none();
#pragma unroll 1
        for (int channel = kWidth * own; channel < rows.size; channel += kWidth * kHalf) {
            Channels<kWidth> raw[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int token = min(first + 2 * i + half, length - 1);
                raw[i] = *reinterpret_cast<const Channels<kWidth>*>(rows.first + token * rows.stride + channel);
            }
            float shifts[kWidth];
#pragma unroll
            for (int j = 0; j < kWidth; ++j) shifts[j] = what.shift(channel + j);
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) part[i] = what.fold(part[i], to_float(raw[i].at[j]), shifts[j]);
            }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
#pragma unroll
            for (int distance = kHalf / 2; distance > 0; distance /= 2) {
                part[i] = What::combine(part[i], __shfl_xor_sync(kAllLanes, part[i], distance));
            }
            if (own == first + 2 * i + half) found = part[i];
        }
    }
    return __shfl_sync(kAllLanes, found, own % 2 * kHalf + own);
}

template <typename What>
__device__ float of_own_token(const Rows& rows, int length, const What& what) {
    return rows.size % kVector == 0 ? of_own_token<kVector>(rows, length, what) : of_own_token<1>(rows, length, what);
}

__device__ double chunk_sum(double x) {
#pragma unroll
    for (int distance = kChunk / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
    return x;
}

// The sum over the tokens behind this lane's.
__device__ double sum_behind(double x) {
    const int token = threadIdx.x % kChunk;
    double sum = __shfl_down_sync(kAllLanes, x, 1, kChunk);
    if (token == kChunk - 1) sum = 0.0;
#pragma unroll
    for (int distance = 1; distance < kChunk; distance *= 2) {
        const double other = __shfl_down_sync(kAllLanes, sum, distance, kChunk);
        if (token + distance < kChunk) sum += other;
    }
    return sum;
}

// The sum over the tokens up to this lane's, which counts.
__device__ double sum_through(double x) {
    const int token = threadIdx.x % kChunk;
#pragma unroll
    for (int distance = 1; distance < kChunk; distance *= 2) {
        const double other = __shfl_up_sync(kAllLanes, x, distance, kChunk);
        if (token >= distance) x += other;
    }
    return x;
}

// What is zero stays zero, however far it is passed on.
__device__ double passed_on(double reach, double size) { return size == 0.0 ? 0.0 : exp(reach) * size; }

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps, 3)
decay_bounds(const Element* q, const Element* k, const Element* v, const Element* g, const Element* beta,
             const float* A_log, const float* dt_bias, int tokens, int key_heads, int value_heads, int key_size,
             int value_size, int gate_form, int beta_form, int qk_l2norm, int quantity, int chunks_per_row,
             float lower_bound, double* logs, double* added) {
    const i64 item = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32;
    const i64 row = item / value_heads;
    const int value_head = static_cast<int>(item % value_heads);
    const int head = value_head / (value_heads / key_heads);
    const i64 first_chunk = row * chunks_per_row;
    const i64 chunks = (static_cast<i64>(tokens) + kChunk - 1) / kChunk;
    if (first_chunk >= chunks) return;
    const int count = static_cast<int>(chunks - first_chunk < chunks_per_row ? chunks - first_chunk : chunks_per_row);

    const auto wanted = static_cast<Quantity>(quantity);
    const bool sampled = wanted == Quantity::kSampledLast || wanted == Quantity::kSampledFirst;
    const bool adds = wanted == Quantity::kState || wanted == Quantity::kGradient;
    const auto form = static_cast<GateForm>(gate_form);
    const double rate = A_log == nullptr ? 1.0 : exp(static_cast<double>(A_log[value_head]));
    const float* bias = dt_bias == nullptr ? nullptr : dt_bias + static_cast<i64>(value_head) * key_size;
    // ||x||^2 of a key or query behind the norm.
    const auto normed = [&](double square) {
        if (!qk_l2norm) return square;
        return isinf(square) ? 1.0 : square / (square + kNormEpsilon);
    };

    double sum = 0.0, size = 0.0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        // What is added last lies next to the boundary looked at: behind the row, for the gradient in front of it.
        const i64 chunk = first_chunk + (wanted == Quantity::kGradient ? count - 1 - i : i);
        const i64 first = chunk * kChunk;
        const int length = static_cast<int>(tokens - first < kChunk ? tokens - first : kChunk);
        const i64 looked_at = wanted == Quantity::kSampledLast ? first + length - 1 : first;
        const int looked_through = sampled ? 1 : length;
        const bool real = static_cast<int>(threadIdx.x % kChunk) < looked_through;
        const auto rows_of = [&](const Element* x, int all, int mine, int channels) {
            const i64 stride = static_cast<i64>(all) * channels;
            return Rows{x + looked_at * stride + static_cast<i64>(mine) * channels, stride, channels};
        };

        const Rows gates = rows_of(g, value_heads, value_head, key_size);
        const float argument = of_own_token(gates, looked_through, Least(form, bias));
        float keys = 0.0f, values = 0.0f, queries = 0.0f;
        const auto squares = [&](const Rows& rows) { return of_own_token(rows, length, Squares{}); };
        if (k != nullptr && !sampled) keys = squares(rows_of(k, key_heads, head, key_size));
        if (adds) values = squares(rows_of(v, value_heads, value_head, value_size));
        if (wanted == Quantity::kGradient) queries = squares(rows_of(q, key_heads, head, key_size));
        if (sampled) {
            sum += chunk_sum(real ? length * log_decay_at(form, argument, rate, lower_bound) : 0.0);
            continue;
        }
        double m = slowest_log_decay(form, argument, rate, lower_bound), strength = 0.0, key_square = 0.0;
        if (k != nullptr) {
            key_square = normed(keys);
            if (real) {
                const float raw = to_float(beta[(first + threadIdx.x % kChunk) * value_heads + value_head]);
                strength = activate_beta(static_cast<BetaForm>(beta_form), static_cast<double>(raw));
            }
            m += log_growth(strength, key_square);
        }
        if (!real) m = 0.0;
        const double chunk_log = chunk_sum(m);
        if (adds) {
            const bool state = wanted == Quantity::kState;
            const double other = state ? fabs(strength) * sqrt(key_square) : sqrt(normed(queries));
            const double term = raised(other * sqrt(static_cast<double>(values)));
            const double reach = state ? sum_behind(m) : sum_through(m);
            size = passed_on(chunk_log, size) + chunk_sum(real ? passed_on(reach, term) : 0.0);
        }
        sum += chunk_log;
    }
    if (threadIdx.x % 32 == 0) {
        logs[row * value_heads + value_head] = sum;
        if (adds) added[row * value_heads + value_head] = size;
    }
}
