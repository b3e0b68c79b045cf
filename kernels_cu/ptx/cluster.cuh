// Blocks of a cluster (sm_90 and later): each other's shared memory, and a barrier of all threads that have not ended.
#pragma once

#include "common/types.cuh"

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
