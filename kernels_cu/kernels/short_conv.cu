// The short causal depthwise convolution before q, k and v.
//
//   y_t = activation(bias + sum_{w < W} weight[:, w] x_{t - W + 1 + w})            within each sequence
//
// In:  x [T, channels]; weight [channels, W], bias [channels] or null, halo [sequences, W - 1, channels] or null float32:
//      the tokens before each sequence's first, oldest first, zeros where null.
// Out: y [T, channels], written.
// Grid: one block per (chunk, kThreads channels), the channels fastest; a thread takes one channel through the chunk.
// Sums are float32, in the order of the taps. A token is read W times, all but once from the cache.
#include "common/math.cuh"
#include "tile/shared/element.cuh"
#include "varlen/chunk.cuh"

namespace {

constexpr int kThreads = 128;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
short_conv(const Element* x, const float* weight, const float* bias, const float* halo, const i64* cu_seqlens,
           const i64* chunk_offsets, int sequences, int channels, int taps, int silu, Element* y) {
    const int tiles = (channels + kThreads - 1) / kThreads;
    const int channel = blockIdx.x % tiles * kThreads + threadIdx.x;
    const ChunkPlace place = place_chunk(blockIdx.x / tiles, chunk_offsets, cu_seqlens, sequences);
    if (channel >= channels) return;

    const i64 start = cu_seqlens[place.sequence];
    for (int i = 0; i < place.length; ++i) {
        float sum = bias == nullptr ? 0.0f : bias[channel];
        for (int tap = 0; tap < taps; ++tap) {
            const i64 token = place.token + i - (taps - 1) + tap;
            float value = 0.0f;
            if (token >= start) {
                value = to_float(x[token * channels + channel]);
            } else if (halo != nullptr) {
                const i64 row = static_cast<i64>(place.sequence) * (taps - 1) + token - start + taps - 1;
                value = halo[row * channels + channel];
            }
            sum = fmaf(weight[channel * taps + tap], value, sum);
        }
        from_float(y[(place.token + i) * channels + channel], silu ? sum * sigmoid(sum) : sum);
    }
}
