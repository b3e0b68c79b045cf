// The fused chain's recurrence alone (probes/probe_roles.cu), while one more thread hands a chunk's operands to the
// other block of a cluster of two again and again: what sharing one preparation between two multiprocessors would cost.
//
// Every `interval` cycles, `turns` times, kPeerBytes go from the block's first slot to the peer's spare one, at most
// kUnderWay copies at a time, in both directions. With `send` 0 the thread waits for the same moments and copies
// nothing. Only the cluster's first block has a recurrence: its descriptors (ptx/wgmma.cuh) have no room for the block's
// number, which the addresses of the second one hold.
//
// In, out: as in probes/probe_roles.cu, of even blocks only. cycles of the first preparation warp: from the first turn
// to the last's end.
// Grid: an even number of blocks; kThreads threads, Shared::kBytes of dynamic shared memory.
#include "probes/ring.cuh"
#include "ptx/barrier.cuh"

namespace {

static_assert(!kPrepares);

// K+, Q+ and Kr, and behind the values the rest of what is prepared.
constexpr int kTileBytes = Slot::kValue;
constexpr int kRestBytes = 1536;
constexpr int kPeerBytes = kTileBytes + kRestBytes;
static_assert(kPeerBytes == 13824 && Slot::kSolve + kRestBytes <= Slot::kBytes);

// A copy's bytes must not count towards the phase of another. The peer sends copy j after the arrival of copy j -
// kUnderWay of ours, which we sent after the arrival of its copy j - 2 kUnderWay: that many barriers keep them apart.
constexpr int kUnderWay = 2;
constexpr int kPeerBarriers = 2 * kUnderWay;

// Nobody releases a slot here. One arrival, of the block that receives.
__device__ u32 peer_barrier(u32 shared, int turn) { return released_barrier(shared, turn % kPeerBarriers); }

__device__ u32 phase_of(int turn) { return turn / kPeerBarriers & 1; }

__device__ void send_slots(u32 shared, int turns, int interval, bool send) {
    const u32 peer = blockIdx.x % 2 ^ 1;
    const u32 target = address_in_block(shared + kSpare * Slot::kBytes, peer);
    i64 due = clock64();
    for (int turn = 0; turn < turns; ++turn) {
        while (clock64() < due) __nanosleep(40);
        due += interval;
        if (!send) continue;
        if (turn >= kUnderWay) wait(peer_barrier(shared, turn - kUnderWay), phase_of(turn - kUnderWay));
        const u32 landed = peer_barrier(shared, turn), peer_landed = address_in_block(landed, peer);
        mbarrier_arrive_expecting(landed, kPeerBytes);
        bulk_copy_to_peer(target, shared, kTileBytes, peer_landed);
        bulk_copy_to_peer(target + Slot::kSolve, shared + Slot::kSolve, kRestBytes, peer_landed);
    }
    for (int turn = send ? max(0, turns - kUnderWay) : turns; turn < turns; ++turn) {
        wait(peer_barrier(shared, turn), phase_of(turn));
    }
}

}  // namespace

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    probe_peer(const unsigned char* raw, const Element* beta, const float* A_log, const float* dt_bias, Element* out,
               float* final_state, i64* cycles, int chunks, int turns, int interval, int send, float lower_bound,
               float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = hold_address(static_cast<u32>(__cvta_generic_to_shared(memory)));
    init_ring(shared, 1);
    fence_barriers_for_cluster();
    cluster_arrive();
    cluster_wait();

    const i64 block = blockIdx.x;
    if (threadIdx.x < 32 * kCarryWarps) {
        take_registers<kCarryRegisters>();
        if (block % 2 == 0) {
            carry_slots(shared, out + block * kChunk * kSize, final_state + block * kStateSize, cycles, chunks, scale);
        }
    } else {
        give_registers<kPrepareRegisters>();
        prepare_slots<false>(memory, shared, {raw, beta, A_log, dt_bias, lower_bound}, kRing);
        if (threadIdx.x == 32 * kCarryWarps) {
            for (int slot = 0; slot < kRing; ++slot) wait(prepared_barrier(shared, slot), 0);
            const i64 start = clock64();
            send_slots(shared, turns, interval, send != 0);
            store_cycles(cycles, start, 0, 1);
        }
    }
    // A block's memory is there until its peer has nothing more to send.
    cluster_arrive();
    cluster_wait();
}
