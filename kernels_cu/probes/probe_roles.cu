// The fused chain's preparation, its recurrence, or both, alone with the multiprocessor: the block of
// kernels/sm90_chain.cu without traffic with the device's memory (probes/ring.cuh).
//
// KDA_PREPARES, KDA_CARRIES 1: that side works for all `chunks`. Where only the recurrence does, it takes operands that
// were prepared before its time starts. The side that is left out gives its registers away or takes them all the same.
//
// In:  raw, beta, A_log, dt_bias: Chunks of probes/ring.cuh, every block the same.
// Out: out [block, 16, 128], final_state [block, 128, 128] float32, of the recurrence; sums [block, preparation warp],
//      of the operands that the warp prepared last, where there is no recurrence; cycles [block, warp] of the warps
//      that worked for all chunks.
// Grid: a block for every multiprocessor; kThreads threads, Shared::kBytes of dynamic shared memory.
#include "common/warp.cuh"
#include "probes/ring.cuh"

namespace {

constexpr bool kCarries = KDA_CARRIES != 0;
static_assert(kPrepares || kCarries);

// The sum of all words of a slot.
__device__ u32 sum_of_slot(const unsigned char* slot, int lane) {
    u32 sum = 0;
    constexpr int kWords = Slot::kDecay / 4 + 4 * kDecayStride;
    for (int i = lane; i < kWords; i += 32) sum += reinterpret_cast<const u32*>(slot)[i];
    return __reduce_add_sync(kAllLanes, sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    probe_roles(const unsigned char* raw, const Element* beta, const float* A_log, const float* dt_bias, Element* out,
                float* final_state, u32* sums, i64* cycles, int chunks, float lower_bound, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = hold_address(static_cast<u32>(__cvta_generic_to_shared(memory)));
    init_ring(shared, 32 * kCarryWarps);

    const i64 block = blockIdx.x;
    if (threadIdx.x < 32 * kCarryWarps) {
        take_registers<kCarryRegisters>();
        if constexpr (kCarries) {
            carry_slots(shared, out + block * kChunk * kSize, final_state + block * kStateSize, cycles, chunks, scale);
        }
    } else {
        give_registers<kPrepareRegisters>();
        const i64 start = clock64();
        prepare_slots<kPrepares && kCarries>(memory, shared, {raw, beta, A_log, dt_bias, lower_bound},
                                             kPrepares ? chunks : kRing);
        if constexpr (kPrepares) store_cycles(cycles, start, 0, 1);
        if constexpr (!kCarries) {
            const int warp = threadIdx.x / 32 - kCarryWarps, lane = threadIdx.x % 32;
            const int last = (chunks - 1 - warp) / kPrepareWarps * kPrepareWarps + warp;
            __syncwarp();
            const u32 sum = sum_of_slot(memory + last % kSlots * Slot::kBytes, lane);
            if (lane == 0) sums[block * kPrepareWarps + warp] = sum;
        }
    }
}
