// The ring of chunks that a chain kernel's block works with in shared memory: constants, slots, barriers. K = V = 128.
//
// Chunk c of the block's work belongs to preparation warp c % 8 and to slot c % kSlots. In a slot the raw q, k, g
// become Q+, K+, Kr in place (a warp owns its chunk's rows); beside them lies a tile of the tokens' value columns.
// Barriers of a slot, at which every lane concerned arrives: loaded (its copies have landed), prepared, released (the
// carrying warps are done, the slot may be loaded again). A warp that starts on chunk c issues the copies of chunk c + 4.
#pragma once

#include "common/gate.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fused/record.cuh"
#include "tile/shared/half_pair.cuh"
#include "tile/shared/swizzled_tile.cuh"
#include "varlen/work_item.cuh"

// Whether queries are read and Q+ and P made.
constexpr bool kQueries = KDA_QUERIES != 0;

constexpr int kSteps = kSize / 16;
constexpr int kStateSize = kSize * kSize;

constexpr int kColumns = KDA_COLUMNS;
constexpr int kGroups = kColumns / SwizzledTile::kColumns;
static_assert(kColumns == 64 * kGroups && (kGroups == 1 || kGroups == 2));

constexpr int kCarryWarps = 4 * kGroups;
constexpr int kPrepareWarps = 8;
constexpr int kThreads = 32 * (kCarryWarps + kPrepareWarps);

// One block a multiprocessor: what a thread gets at launch, and after the roles have traded.
constexpr int kLaunchRegisters = kGroups == 2 ? 128 : 168;
constexpr int kPrepareRegisters = kGroups == 2 ? 112 : 144;
constexpr int kCarryRegisters = kGroups == 2 ? 144 : 216;
static_assert(kPrepareWarps * kPrepareRegisters + kCarryWarps * kCarryRegisters == kLaunchRegisters * kThreads / 32);

// Steps of 16 channels laid out side by side. The loops of both roles share an instruction cache that eight steps
// overflow.
constexpr int kPrepareUnroll = 1;

constexpr int kSlots = 12;
constexpr int kLoadAhead = 4;
static_assert(kSlots == kPrepareWarps + kLoadAhead, "the slot loaded for chunk c + 4 is the one of chunk c - 8");
static_assert(kLoadAhead * 2 == kPrepareWarps, "the first four chunks are loaded by the last four warps");

// What dropping the bits below TF32 takes from a product of one such operand on average: 2^-11 times the mean of 1/m
// over mantissas m that weigh as they do in a sum of products, about 0.66.
constexpr float kRestored = 1.0f + 0.66f / 2048.0f;

// e^gamma_C in the order in which a carrying lane reads it: [lane % 4][step][group of 8 channels][2], padded.
constexpr int kDecayStride = 4 * kSteps + 4;

// Tiles of 64 channels lie in pairs. K+ and Q+ alternate, so that 32 rows of one half of the channels are one operand.
struct Slot {
    static constexpr int kKey = 0;
    static constexpr int kQuery = kKey + SwizzledTile::kBytes;
    static constexpr int kKeyDistance = 2 * SwizzledTile::kBytes;
    static constexpr int kGate = kKey + 2 * kKeyDistance;
    static constexpr int kGateDistance = SwizzledTile::kBytes;
    static constexpr int kValue = kGate + 2 * kGateDistance;
    static constexpr int kValueDistance = SwizzledTile::kBytes;
    static constexpr int kSolve = kValue + 2 * kValueDistance;
    static constexpr int kAttend = kSolve + BlockedSquare::kBytes;
    // Diag(beta) G in float32 until the solve is done, in the place of the two squares.
    static constexpr int kLower = kSolve;
    static constexpr int kDecay = kAttend + BlockedSquare::kBytes;
    // beta of each token, float32.
    static constexpr int kStrength = kDecay + 4 * kDecayStride * 4;
    // The swizzle wants tiles at multiples of 1024 bytes.
    static constexpr int kBytes = (kStrength + 4 * kChunk + 1023) / 1024 * 1024;
};
static_assert(16 * 16 * 4 <= 2 * BlockedSquare::kBytes);

struct Shared {
    static constexpr int kBias = kSlots * Slot::kBytes;                  // scaled dt_bias, per preparation warp
    static constexpr int kBarriers = kBias + kPrepareWarps * kSize * 4;  // loaded, prepared, released
    static constexpr int kBytes = kBarriers + 3 * kSlots * 8;
};
static_assert(Shared::kBytes == KDA_SHARED_BYTES, "the launch table must know");

__device__ u32 loaded_barrier(u32 shared, int slot) { return shared + Shared::kBarriers + 8 * slot; }
__device__ u32 prepared_barrier(u32 shared, int slot) { return loaded_barrier(shared, kSlots + slot); }
__device__ u32 released_barrier(u32 shared, int slot) { return loaded_barrier(shared, 2 * kSlots + slot); }

__device__ void wait(u32 barrier, u32 parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// By all threads of the block, which are in step afterwards.
__device__ void init_barriers(u32 shared) {
    if (threadIdx.x < kSlots) {
        mbarrier_init(loaded_barrier(shared, threadIdx.x), 32);
        mbarrier_init(prepared_barrier(shared, threadIdx.x), 32);
        mbarrier_init(released_barrier(shared, threadIdx.x), 32 * kCarryWarps);
    }
    __syncthreads();
}

// The operands of a slot as the B of a product, `offset` bytes behind its start, a multiple of 16: a slot's descriptors
// differ by a constant in their lower halves. Rows of a swizzled tile with its channels along k; a square with its columns
// along k; 16 rows along k, with the channels of two tiles kDistance bytes apart as columns.
__device__ u64 rows_descriptor(u32 slot, int offset) {
    constexpr u64 kLayout = wgmma_layout(16, 8 * SwizzledTile::kRowBytes, true);
    return wgmma_descriptor(kLayout, slot / 16 + offset / 16);
}

__device__ u64 square_descriptor(u32 slot, int offset) {
    constexpr u64 kLayout = wgmma_layout(BlockedSquare::kAlongRow, BlockedSquare::kAlongColumn, false);
    return wgmma_descriptor(kLayout, slot / 16 + offset / 16);
}

template <int kDistance>
__device__ u64 columns_descriptor(u32 slot, int offset) {
    constexpr u64 kLayout = wgmma_layout(kDistance, 8 * SwizzledTile::kRowBytes, true);
    return wgmma_descriptor(kLayout, slot / 16 + offset / 16);
}
