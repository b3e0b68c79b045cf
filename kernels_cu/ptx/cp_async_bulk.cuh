// Asynchronous copies of whole blocks into shared memory (sm_90 and later), asked for by one thread. Their bytes count
// towards a barrier's phase, which is over once its arrivals and all bytes that they announced have come. Addresses and
// sizes are multiples of 16 bytes.
#pragma once

#include "common/types.cuh"

// Arrives, and announces so many bytes to the phase.
__device__ inline void mbarrier_arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void bulk_copy(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}

// peer and peer_barrier: addresses in another block of the cluster (cluster.cuh).
__device__ inline void bulk_copy_to_peer(u32 peer, u32 shared, u32 bytes, u32 peer_barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     peer),
                 "r"(shared), "r"(bytes), "r"(peer_barrier)
                 : "memory");
}
