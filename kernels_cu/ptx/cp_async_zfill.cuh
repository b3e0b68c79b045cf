// A 16-byte copy from global to shared memory that writes zeros instead where `wanted` is false (the source is then
// not read). Completion: mbarrier_arrive_after_copies.
#pragma once

#include "common/types.cuh"

__device__ inline void cp_async_or_zero(u32 shared, const void* global, bool wanted) {
    const u32 bytes = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
