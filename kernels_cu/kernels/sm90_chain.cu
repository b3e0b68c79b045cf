// The fused chain for K = V = 128, 16-bit inputs, normalised q and k and beta in [0, 2]: activation, chunk operands and
// the recurrence of one piece, value head and block of value columns in a thread block.
//
//   per chunk of 16 tokens, S [128, columns] carried from chunk to chunk in float32 registers:
//     gamma_i = sum of the log decays up to token i,  K+ = k e^gamma,  K- = k e^-gamma,  Q+ = q e^gamma
//     G = tril(K+ K-^T, -1),  P = tril(Q+ K-^T),  N = (I + Diag(beta) G)^-1,  Kr = K- e^gamma_C
//     U = N Diag(beta) (V - K+ S),  O = scale (Q+ S + P U),  S <- Diag(e^gamma_C) S + Kr^T U
//
// KDA_BOUNDED 1: the `lower_bound` gate, lower_bound >= -5. KDA_BOUNDED 0: the gates `softplus` and `log`.
// KDA_QUERIES 1: reads all tokens and writes out and the last states.
// KDA_QUERIES 0: writes only what the pieces carry, the last state or (Carried::kTransition) the transition.
// KDA_SAVES 1 (with KDA_QUERIES 1): also writes, for the backward, the records of tile/fused/record.cuh.
//
// In:  q, k [T,H,128], v [T,HV,128], g [T,HV,128], beta [T,HV] of one 16-bit type, contiguous, 16-byte aligned;
//      A_log [HV], dt_bias [HV,128] float32 or null; initial_state [N,HV,128,128] float32 or null; pieces and, null or
//      not, warmup_chunks (varlen/work_item.cuh). A piece starts with an even chunk of its sequence if KDA_SAVES is 1.
// Out: out [T,HV,128] of the inputs' type; final_state, carried [slot,HV,128,128] float32, [K,V]; transitions likewise,
//      [out,in]; states, tokens, units (records). Every element of a piece is written, nothing else.
// Grid: at most one block a multiprocessor, items dealt in turns; kThreads threads, Shared::kBytes of dynamic shared
// memory.
//
// One warpgroup for every 64 value columns carries the state, transposed: value columns are rows of the accumulators.
// Eight more warps prepare (tile/fused/prepare.cuh); the two sides meet in a ring of slots (tile/fused/ring.cuh). v is
// overwritten by the outputs on their way out.
#include "tile/fused/chain_forward.cuh"
#include "tile/fused/prepare.cuh"
#include "tile/fused/record.cuh"

namespace {

constexpr bool kSaves = KDA_SAVES != 0;
static_assert(!kReversed && (kOutputs || !kSaves));

// The outputs of the chunk before, in its value tile: they leave for global memory, and the slot is released, while the
// next chunk's products run.
struct Outgoing {
    Element* target;  // the lane's 16 bytes
    int length;       // tokens from the chunk's start to the piece's end, 0 when nothing is waiting
};

// The slot before a slot: there a chunk's outputs wait while the next chunk is worked on.
__device__ int slot_before(int slot) { return slot == 0 ? kSlots - 1 : slot - 1; }

__device__ void carry(u32 shared, const Work& work, const States& states, const Records& records, Element* out,
                      float scale) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 values_of_group = Slot::kValue + group * Slot::kValueDistance;
    const u32 value_place =
        hold_address(values_of_group + SwizzledTile::step(SwizzledTile::columns_first(lane), warp, 0));
    // The eight lanes of one shared-memory access take rows whose pieces lie in different banks.
    const int store_row = ((lane >> 1 & 3) << 1) | ((lane >> 3) & 1) | ((lane >> 1) & 8);
    const u32 store_place = hold_address(values_of_group + SwizzledTile::piece(store_row, 2 * warp + lane % 2));
    const i64 chunk_elements = static_cast<i64>(kChunk) * work.value_heads * kSize;

    State state;
    RingPlace<kSlots> place = {0, 0};
    Outgoing outgoing = {nullptr, 0};
    const auto fetch = [&] { return load_shared_uint4(shared + slot_before(place.slot) * Slot::kBytes + store_place); };
    const auto send = [&](uint4 outputs) {
        if (outgoing.length == 0) return;
        // First the arrival: behind the store it would wait until the store is done.
        mbarrier_arrive(released_barrier(shared, slot_before(place.slot)));
        if (store_row < outgoing.length) *reinterpret_cast<uint4*>(outgoing.target) = outputs;
    };
    Cursor cursor = Cursor::at_start(work);
    while (!cursor.done(work)) {
        const int first_column = cursor.split * kColumns + group * SwizzledTile::kColumns + warp * 16;
        Element* target = out + (cursor.token() * work.value_heads + cursor.head) * kSize + first_column +
                          static_cast<i64>(store_row) * work.value_heads * kSize + lane % 2 * 8;
        const bool values = cursor.piece.carried == Carried::kState;
        state.begin(cursor, states, work.value_heads, first_column, lane);
        i64 tile_and_head = cursor.piece.first_tile * work.value_heads + cursor.head;
        int chunk_of_tile = 0;
        for (int left = cursor.piece.tokens; left > 0; left -= kChunk) {
            const u32 slot = shared + place.slot * Slot::kBytes;
            float products[kProducts];
            u32 raw[4] = {0, 0, 0, 0}, rounded[kSteps][4], packed[4];
            KeptUpdates kept;
            state.look(left / kChunk);
            wait(prepared_barrier(shared, place.slot), place.parity);
            // Asked for before the products start, to have arrived when they are under way.
            if (values) ldmatrix_transposed(raw, slot + value_place);
            uint4 outputs;
            if (kOutputs && outgoing.length != 0) outputs = fetch();
            const float unit = state.unit;
            start_products(state, products, rounded, slot, lane);
            if constexpr (kOutputs) send(outputs);
            if constexpr (kSaves) {
                if (chunk_of_tile == 0) {
                    RecordPlace(records, tile_and_head, Record::kForwardUnits, first_column, lane)
                        .store_state(rounded, unit, lane);
                }
            }
            update_state<kSaves>(state, products, raw, slot, scale, kept, packed, lane);
            if constexpr (kSaves) {
                RecordPlace(records, tile_and_head, Record::kForwardUnits, first_column, lane)
                    .store_tokens(kept.packed, chunk_of_tile, kept.unit, lane);
                tile_and_head += chunk_of_tile * work.value_heads;
                chunk_of_tile ^= 1;
            }
            if constexpr (kOutputs) {
                // The warp's own columns of v have been read: the outputs take their place.
                stmatrix_transposed(slot + value_place, packed);
                __syncwarp();
                outgoing = {target, left};
                target += chunk_elements;
            }
            wgmma_wait<0>();
            if constexpr (!kOutputs) mbarrier_arrive(released_barrier(shared, place.slot));
            place.advance(1);
        }
        state.end(cursor, states, work.value_heads, first_column, lane);
        cursor.chunk = 0;
        cursor.item += gridDim.x;
        cursor.open(work);
    }
    if (outgoing.length != 0) send(fetch());
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_chain(const Element* q, const Element* k, const Element* v, const Element* g, const Element* beta,
               const float* A_log, const float* dt_bias, const float* initial_state, float* final_state,
               float* carried, float* transitions, Element* out, u32* states, u32* tokens, float* units,
               const Piece* pieces, const int* warmup_chunks, int items, int key_heads, int value_heads, int gate_form,
               int beta_form, float lower_bound, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = hold_address(static_cast<u32>(__cvta_generic_to_shared(memory)));
    init_barriers(shared);

    const Work work = {pieces, warmup_chunks, items, key_heads, value_heads, kSize / kColumns};
    if (threadIdx.x < 32 * kCarryWarps) {
        take_registers<kCarryRegisters>();
        carry(shared, work, {initial_state, final_state, carried, transitions}, {states, tokens, units}, out, scale);
    } else {
        give_registers<kPrepareRegisters>();
        const Inputs in = {q, k, v, g, beta, A_log, dt_bias, key_heads, value_heads, static_cast<GateForm>(gate_form),
                           static_cast<BetaForm>(beta_form), lower_bound};
        prepare(memory, shared, work, in);
    }
}
