// Asynchronous copies of 16 bytes from global to shared memory, counted in groups per thread.
#pragma once

#include "common/types.cuh"

// Both addresses 16-byte aligned. Visible to this thread after cp_async_wait, to others after a barrier behind it.
__device__ inline void cp_async(void* shared, const void* global) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
