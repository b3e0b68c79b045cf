// The adjoint of short_conv.cu.
//
//   d_t = dy_t activation'(s_t),  s_t = bias + sum_{w < W} weight[:, w] x_{t - W + 1 + w}
//   dx_t = sum_{w < W} weight[:, w] d_{t + W - 1 - w}                               within each sequence
//   dweight[:, w] = sum_t d_t x_{t - W + 1 + w},  dbias = sum_t d_t
//
// In:  dy, x [T, channels]; weight [channels, W], bias [channels] or null, halo [sequences, W - 1, channels] or null
//      float32: the tokens before each sequence's first, oldest first, zeros where null. bounds, chunk_offsets
//      [sequences + 1]: of rows, which are the tokens of each sequence behind the W - 1 of its halo.
// Out: dx [T, channels]; dhalo [sequences, W - 1, channels] float32, the halo's part of dx; partials
//      [chunks, W + 1, channels] float32: the chunk's sums of dweight, tap by tap, then of dbias. Written.
// Grid: one block per (chunk of rows, kThreads channels), the channels fastest. A thread takes one channel of the
// chunk, computes d of its rows and of the W - 1 behind them, and shares nothing: nobody synchronises. s is summed in
// the order of short_conv.cu; all sums are float32, in a fixed order.
#include "common/math.cuh"
#include "tile/shared/element.cuh"
#include "varlen/chunk.cuh"

namespace {

constexpr int kThreads = 128;

// Derivative of x sigmoid(x).
__device__ float silu_slope(float x) {
    const float s = sigmoid(x);
    return s + x * s * sigmoid(-x);
}

__device__ int within_chunk(i64 rows) { return rows < 0 ? 0 : rows < kChunk ? static_cast<int>(rows) : kChunk; }

// One channel of a sequence: where its rows lie in the tensors of tokens and of halos.
struct Column {
    i64 sequence;
    i64 start;  // first row of the sequence, the oldest of its halo
    int halo;   // rows of its halo, W - 1
    int channels;
    int channel;

    __device__ i64 first_token() const { return start + halo; }
    __device__ i64 token(i64 row) const { return (row - (sequence + 1) * halo) * channels + channel; }
    __device__ i64 previous(i64 row) const { return (sequence * halo + row - start) * channels + channel; }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
short_conv_backward(const Element* dy, const Element* x, const float* weight, const float* bias, const float* halo,
                    const i64* bounds, const i64* chunk_offsets, int sequences, int channels, int taps, int silu,
                    Element* dx, float* dhalo, float* partials) {
    // d of kChunk rows; every thread has its own column.
    __shared__ float d_rows[kChunk][kThreads];
    const int tiles = (channels + kThreads - 1) / kThreads;
    const int channel = blockIdx.x % tiles * kThreads + threadIdx.x;
    const i64 chunk = blockIdx.x / tiles;
    const ChunkPlace place = place_chunk(chunk, chunk_offsets, bounds, sequences);
    if (channel >= channels) return;

    const int before = taps - 1;
    const i64 end = bounds[place.sequence + 1];
    const Column column{place.sequence, bounds[place.sequence], before, channels, channel};
    const float* weights = weight + static_cast<i64>(channel) * taps;
    const auto input = [&](i64 row) {
        if (row >= column.first_token()) return to_float(x[column.token(row)]);
        return halo == nullptr ? 0.0f : halo[column.previous(row)];
    };

    float result[kChunk] = {};
    // The chunk's own rows, then those behind it that read them.
    for (int first = 0; first < kChunk + before && place.token + first < end; first += kChunk) {
        const i64 row = place.token + first;
        // Rows [from, to) are tokens, and wanted.
        const int from = within_chunk(column.first_token() - row);
        const int to = min(within_chunk(end - row), kChunk + before - first);

        float d[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) d[i] = bias == nullptr ? 0.0f : bias[channel];
        for (int tap = 0; tap < taps; ++tap) {
            const float factor = weights[tap];
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                if (i >= from && i < to) d[i] = fmaf(factor, input(row + i - before + tap), d[i]);
            }
        }
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            if (i >= from && i < to) {
                const float given = to_float(dy[column.token(row + i)]);
                d[i] = silu ? given * silu_slope(d[i]) : given;
                d_rows[i][threadIdx.x] = d[i];
                sum += d[i];
            }
        }

        if (first == 0) {
            float* mine = partials + chunk * (taps + 1) * channels + channel;
            mine[static_cast<i64>(taps) * channels] = sum;
            for (int tap = 0; tap < taps; ++tap) {
                float product = 0.0f;
#pragma unroll
                for (int i = 0; i < kChunk; ++i) {
                    if (i >= from && i < to) product = fmaf(d[i], input(row + i - before + tap), product);
                }
                mine[static_cast<i64>(tap) * channels] = product;
            }
        }

        for (int tap = 0; tap < taps; ++tap) {
            const float factor = weights[tap];
            // The row that has row i of the chunk under this tap.
            const int shift = before - tap - first;
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                const int reader = i + shift;
                if (reader >= from && reader < to) result[i] = fmaf(factor, d_rows[reader][threadIdx.x], result[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        if (i >= place.length) continue;
        const i64 row = place.token + i;
        if (row >= column.first_token()) {
            from_float(dx[column.token(row)], result[i]);
        } else {
            dhalo[column.previous(row)] = result[i];
        }
    }
}
