// Asynchronous copies of 4 and 8 bytes from global to shared memory, for elements that change places on the way.
// Counted in the same groups as those of cp_async.cuh.
#pragma once

#include "common/types.cuh"

// Both addresses aligned to the size.
__device__ inline void cp_async_4(void* shared, const void* global) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
}

__device__ inline void cp_async_8(void* shared, const void* global) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(global) : "memory");
}
