// Barriers in shared memory, and those of a cluster.
#pragma once

#include "common/types.cuh"

// Barriers in shared memory, 8 bytes each. A barrier completes a phase when all its arrivals have come; phases
// alternate between parity 0 and 1. Waiting for parity 1 on a fresh barrier returns at once.

__device__ inline void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Releases this thread's earlier writes to whoever waits.
__device__ inline void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once all earlier cp_async copies of this thread have landed; counts as one of the barrier's arrivals.
__device__ inline void mbarrier_arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Whether the phase of this parity is over; may suspend the thread for a while.
__device__ inline bool mbarrier_try_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Blocks of a cluster (sm_90 and later): each other's shared memory, and a barrier of all threads that have not ended.

// Where an address of this block's shared memory lies in the block of that rank.
__device__ inline u32 address_in_block(u32 shared, u32 rank) {
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}

// Makes barriers that this thread has initialised ready for the copy engine, and for copies that arrive there from
// other blocks once the cluster's barrier behind it is passed.
__device__ inline void fence_barriers_for_cluster() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Releases this thread's earlier writes to whoever waits.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
