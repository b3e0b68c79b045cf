// The two sides of the fused chain on the same few chunks again and again: what is left of kernels/sm90_chain.cu
// without its tables, cursors and traffic with the device's memory.
//
// Chunk c is that of its slot in the ring. A slot is loaded by one bulk copy of its raw tiles, which stay in the L2
// cache; the outputs of all chunks go to one place. One sequence and head from a state of zeros, kColumns = 128.
//
// KDA_PREPARES 1: the preparation goes on as long as the recurrence. 0: it makes the operands once; the outputs then go
// to a slot of their own, so that the values stay.
#pragma once

#include "probes/clock.cuh"
#include "ptx/copy.cuh"
#include "tile/fused/chain_forward.cuh"
#include "tile/fused/prepare.cuh"

constexpr bool kPrepares = KDA_PREPARES != 0;

// Slots of the ring; behind those of prepared chunks one is spare.
constexpr int kRing = kPrepares ? kSlots : kSlots - 1;
constexpr int kSpare = kSlots - 1;

// A slot's raw k, q, g and v.
constexpr int kRawBytes = Slot::kSolve;

// What is read. raw: [kRing] slots as they are loaded; beta [kRing, kChunk]; dt_bias [kSize].
struct Chunks {
    const unsigned char* raw;
    const Element* beta;
    const float* A_log;
    const float* dt_bias;
    float lower_bound;
};

// By all threads of the block. The copies arrive at `loaded` with one arrival of the lane that asks for them; releases:
// the arrivals of `released`.
__device__ void init_ring(u32 shared, u32 releases) {
    if (threadIdx.x < kSlots) {
        mbarrier_init(loaded_barrier(shared, threadIdx.x), 1);
        mbarrier_init(prepared_barrier(shared, threadIdx.x), 32);
        mbarrier_init(released_barrier(shared, threadIdx.x), releases);
        fence_shared_for_wgmma();
    }
    __syncthreads();
}

// `prepare` of tile/fused/prepare.cuh. kReleased: whether slots come back from carrying warps; without them a slot is
// free when its chunk is prepared, which the warp that loads it next did itself.
template <bool kReleased>
__device__ void prepare_slots(unsigned char* memory, u32 shared, const Chunks& in, int chunks) {
    const int warp = threadIdx.x / 32 - kCarryWarps, lane = threadIdx.x % 32;
    const auto load = [&](int chunk, const RingPlace<kSlots>& at) {
        if (chunk >= chunks) return;
        const u32 loaded = loaded_barrier(shared, at.slot);
        if constexpr (kReleased) wait(released_barrier(shared, at.slot), at.parity ^ 1);
        __syncwarp();
        if (lane == 0) {
            // Ordinary writes to the slot come before the copy's.
            fence_shared_for_wgmma();
            mbarrier_arrive_expecting(loaded, kRawBytes);
            bulk_copy(shared + at.slot * Slot::kBytes, in.raw + at.slot * kRawBytes, kRawBytes, loaded);
        }
    };

    float* bias = reinterpret_cast<float*>(memory + Shared::kBias) + warp * kSize;
    const Strength strength(BetaForm::kLogit);
    const Gates gates(GateForm::kLowerBound, expf(*in.A_log), in.lower_bound);
#pragma unroll
    for (int i = 0; i < kSize / 32; ++i) bias[32 * i + lane] = gates.rate * in.dt_bias[32 * i + lane];
    if (warp >= kLoadAhead) load(warp - kLoadAhead, {warp - kLoadAhead, 0});

    RingPlace<kSlots> place = {warp, 0};
    for (int chunk = warp; chunk < chunks; chunk += kPrepareWarps) {
        const Element raw_beta = in.beta[place.slot * kChunk + (lane & 15)];
        const u32 slot = shared + place.slot * Slot::kBytes;
        wait(loaded_barrier(shared, place.slot), place.parity);
        const float2 key_norm = log2_norms(slot + Slot::kKey, lane);
        const float2 query_norm = log2_norms(slot + Slot::kQuery, lane);
        RingPlace<kSlots> ahead = place;
        ahead.advance(kLoadAhead);
        load(chunk + kLoadAhead, ahead);
        prepare_chunk(memory + place.slot * Slot::kBytes, slot, bias, gates, raw_beta, strength, kChunk, key_norm,
                      query_norm, lane);
        fence_shared_for_wgmma();
        mbarrier_arrive(prepared_barrier(shared, place.slot));
        place.advance(kPrepareWarps);
    }
}

// `carry` of kernels/sm90_chain.cu. out [kChunk, kSize]: the last chunk's; final_state [kSize, kSize]. Its cycles are
// counted from where, without a preparation that goes on, all operands are there.
__device__ void carry_slots(u32 shared, Element* out, float* final_state, i64* cycles, int chunks, float scale) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 values_of_group = Slot::kValue + group * Slot::kValueDistance;
    const u32 value_place = values_of_group + SwizzledTile::step(SwizzledTile::columns_first(lane), warp, 0);
    const int store_row = ((lane >> 1 & 3) << 1) | ((lane >> 3) & 1) | ((lane >> 1) & 8);
    const u32 store_place = values_of_group + SwizzledTile::piece(store_row, 2 * warp + lane % 2);
    const int first_column = group * SwizzledTile::kColumns + warp * 16;
    uint4* target = reinterpret_cast<uint4*>(out + store_row * kSize + first_column + lane % 2 * 8);

    State state;
    state.visit(first_column, lane, [](int, int, float& x) { x = 0.0f; });
    state.unit = 1.0f;
    state.measure();
    if constexpr (!kPrepares) {
        for (int slot = 0; slot < kRing; ++slot) wait(prepared_barrier(shared, slot), 0);
    }
    const i64 start = clock64();

    RingPlace<kRing> place = {0, 0};
    int outgoing = kSlots;
    for (int left = chunks; left > 0; --left) {
        const u32 slot = shared + place.slot * Slot::kBytes;
        float products[kProducts];
        u32 raw[4], rounded[kSteps][4], packed[4];
        KeptUpdates kept;
        state.look(left);
        wait(prepared_barrier(shared, place.slot), kPrepares ? place.parity : 0);
        ldmatrix_transposed(raw, slot + value_place);
        uint4 outputs;
        if (outgoing != kSlots) outputs = load_shared_uint4(shared + outgoing * Slot::kBytes + store_place);
        start_products(state, products, rounded, slot, lane);
        if (outgoing != kSlots) {
            *target = outputs;
            if constexpr (kPrepares) mbarrier_arrive(released_barrier(shared, outgoing));
        }
        update_state<false>(state, products, raw, slot, scale, kept, packed, lane);
        outgoing = kPrepares ? place.slot : kSpare;
        stmatrix_transposed(shared + outgoing * Slot::kBytes + value_place, packed);
        __syncwarp();
        wgmma_wait<0>();
        place.advance(1);
    }
    store_cycles(cycles, start, 0, 1);

    if (outgoing != kSlots) *target = load_shared_uint4(shared + outgoing * Slot::kBytes + store_place);
    const float restore = reciprocal_of_power(state.unit);
    state.visit(first_column, lane, [&](int k, int v, float& x) { final_state[k * kSize + v] = restore * x; });
}
