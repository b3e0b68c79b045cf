// Asynchronous copies from global to shared memory.
#pragma once

#include "common/types.cuh"

// Asynchronous copies of 16 bytes from global to shared memory, counted in groups per thread.

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

// Asynchronous copies of 4 and 8 bytes from global to shared memory, for elements that change places on the way.
// Counted in the same groups as the copies of 16 bytes.

// Both addresses aligned to the size.
__device__ inline void cp_async_4(void* shared, const void* global) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
}

__device__ inline void cp_async_8(void* shared, const void* global) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(global) : "memory");
}

// A 16-byte copy from global to shared memory that writes zeros instead where `wanted` is false (the source is then
// not read). Completion: mbarrier_arrive_after_copies.

__device__ inline void cp_async_or_zero(u32 shared, const void* global, bool wanted) {
    const u32 bytes = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Asynchronous copies of whole blocks into shared memory (sm_90 and later), asked for by one thread. Their bytes count
// towards a barrier's phase, which is over once its arrivals and all bytes that they announced have come. Addresses and
// sizes are multiples of 16 bytes.

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

// peer and peer_barrier: addresses in another block of the cluster (barrier.cuh).
__device__ inline void bulk_copy_to_peer(u32 peer, u32 shared, u32 bytes, u32 peer_barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     peer),
                 "r"(shared), "r"(bytes), "r"(peer_barrier)
                 : "memory");
}

// Asks for the 128 bytes around an address to be brought into the L2 cache.

__device__ inline void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }
