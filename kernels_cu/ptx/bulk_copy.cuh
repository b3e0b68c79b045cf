// Copies of whole runs of memory by the copy engine, from global to shared memory (sm_90), counted in bytes by a barrier
// of mbarrier.cuh: one arrival says how many bytes to wait for, the phase ends when they have come.
#pragma once

#include "common/types.cuh"

// Makes the barriers that this thread has initialised visible to the copy engine.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Addresses and bytes: multiples of 16.
__device__ inline void bulk_copy(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}
