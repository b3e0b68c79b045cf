// Asks for memory to be brought into the L2 cache.
#pragma once

#include "common/types.cuh"

// The 128 bytes around an address.
__device__ inline void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }
