// How many chunks before a cut (KDA_REVERSED 1: behind it) determine the state (its gradient) there, by a bound that is
// a proof, rounding included (tile/shared/decay_bound.cuh).
//
//   One token's map has spectral norm at most max_d e^(l_d) when k is normalised and 0 <= beta <= 2, so a run of tokens
//   changes a state by at most e^sum, sum = sum over its tokens of max_d l_d. Scanning away from the cut, the first
//   chunk at which sum <= log_tolerance ends the warm-up: run from zero over those chunks, the state at the cut is
//   wrong by at most e^sum times the norm of the state dropped.
//
// In:  g [T,HV,128] of a 16-bit type, 16-byte aligned; A_log [HV], dt_bias [HV,128] float32 or null; cuts [slot];
//      lower_bound not below the gate's own.
// Out: warmup_chunks [slot,HV]: chunks next to the cut to run from zero, or -1: not within `chunks`, use the
//      transition. bounds [slot,HV]: the sum reached, natural log, rounded up; NaN where a gate is. Both written for every
//      slot and head.
// Grid: one block for each slot and head, the head fastest; 512 threads. A round covers one chunk a warp, the warps
// going away from the cut.
#include "common/shape.cuh"
#include "common/warp.cuh"
#include "tile/shared/decay_bound.cuh"
#include "tile/shared/half_pair.cuh"

namespace {

using Pair = HalfPair<Element>;

constexpr bool kReversed = KDA_REVERSED != 0;
constexpr int kSize = 128;
constexpr int kWarps = 16;
static_assert(kChunk == 16, "two lanes a token");

// One row of the cut table, written by the host: 16 bytes.
struct Cut {
    i64 token;   // first token behind the cut
    int chunks;  // whole chunks on its side that may be scanned
    int unused;
};
static_assert(sizeof(Cut) == 16);

// The gates of one head; bias: dt_bias in shared memory, zeros where absent.
struct Head {
    const float* bias;
    GateForm form;
    double rate, lower_bound;

    // Sum over a chunk's tokens of their largest log decay; first: the chunk's first gate.
    __device__ double chunk_bound(const Element* first, int row_elements, int lane) const {
        const Element* from = first + static_cast<i64>(lane / 2) * row_elements + 64 * (lane % 2);
        const float* own_bias = bias + 64 * (lane % 2);
        const LeastArgument argument = {form};
        float least = LeastArgument::none();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint4 raw = reinterpret_cast<const uint4*>(from)[i];
            const u32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 g = Pair::unpack(pairs[j]);
                least = argument.fold(least, g.x, own_bias[8 * i + 2 * j]);
                least = argument.fold(least, g.y, own_bias[8 * i + 2 * j + 1]);
            }
        }
        least = LeastArgument::combine(least, __shfl_xor_sync(kAllLanes, least, 1));
        double sum = slowest_log_decay(form, least, rate, lower_bound);
#pragma unroll
        for (int distance = 2; distance < 32; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
        return sum;
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    certify_cuts(const Element* g, const float* A_log, const float* dt_bias, const Cut* cuts, int* warmup_chunks,
                 float* bounds, int value_heads, int gate_form, float lower_bound, float log_tolerance) {
    __shared__ float bias[kSize];
    __shared__ double sums[kWarps];
    const int slot = blockIdx.x / value_heads, value_head = blockIdx.x % value_heads;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Cut cut = cuts[slot];
    if (threadIdx.x < kSize) {
        bias[threadIdx.x] = dt_bias != nullptr ? dt_bias[static_cast<i64>(value_head) * kSize + threadIdx.x] : 0.0f;
    }
    const Head head = {bias, static_cast<GateForm>(gate_form),
                       A_log != nullptr ? exp(static_cast<double>(A_log[value_head])) : 1.0, lower_bound};
    double reached = 0.0;
    int found = -1;
    for (int behind = 0; behind < cut.chunks && found < 0; behind += kWarps) {
        __syncthreads();
        const int away = behind + warp;
        if (away < cut.chunks) {
            const int chunk = kReversed ? away : -1 - away;
            const i64 row = (cut.token + static_cast<i64>(chunk) * kChunk) * value_heads + value_head;
            const double sum = head.chunk_bound(g + row * kSize, value_heads * kSize, lane);
            if (lane == 0) sums[warp] = sum;
        }
        __syncthreads();
        for (int i = 0; i < kWarps && behind + i < cut.chunks && found < 0; ++i) {
            reached += sums[i];
            if (__double2float_ru(reached) <= log_tolerance) found = behind + i + 1;
        }
    }
    if (threadIdx.x == 0) {
        warmup_chunks[blockIdx.x] = found;
        bounds[blockIdx.x] = __double2float_ru(reached);
    }
}
