// How the probes report time: clock cycles by warp.
#pragma once

#include "common/types.cuh"

// Cycles since `start`, by the warp's first lane, to [block, phase, warp].
__device__ void store_cycles(i64* cycles, i64 start, int phase, int phases) {
    const i64 now = clock64();
    if (threadIdx.x % 32 == 0) {
        const i64 row = static_cast<i64>(blockIdx.x) * phases + phase;
        cycles[row * (blockDim.x / 32) + threadIdx.x / 32] = now - start;
    }
}
