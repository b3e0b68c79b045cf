// What all lanes of a warp do together.
#pragma once

#include "common/types.cuh"

constexpr u32 kAllLanes = 0xffffffffu;

// The sum over the lanes, in every lane, always in the same order.
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
    return x;
}
