// Asks the copy engine to bring a run of memory into the L2 cache (sm_90).
#pragma once

#include "common/types.cuh"

// Address and bytes: multiples of 16.
__device__ inline void bulk_prefetch_l2(const void* global, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
}
