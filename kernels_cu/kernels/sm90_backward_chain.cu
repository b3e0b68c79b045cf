// The fused chain of the backward, for what sm90_chain.cu takes: the gradient of the state from chunk to chunk, from
// the last to the first, over one piece, value head and block of value columns in a thread block.
//
//   per chunk of 16 tokens, with the operands of tile/fused/prepare.cuh and dS [128, columns] carried in float32:
//     dU = scale P^T dO + Kr dS,  X = N^T dU,  dS <- Diag(e^gamma_C) dS + scale Q+^T dO - K+^T Diag(beta) X
//
//   dV = Diag(beta) X is left to the gradients' kernel: float16 would lose it where beta is small.
//
// KDA_SAVES 1: also writes the records of tile/fused/record.cuh: dS behind every tile, X of every token, and with their
// units the largest |dO| of every chunk by 16 value columns.
//
// In:  q, k [T,H,128], d_out, g [T,HV,128], beta [T,HV] of one 16-bit type, contiguous, 16-byte aligned; A_log [HV],
//      dt_bias [HV,128] float32 or null; d_final_state [N,HV,128,128] float32 or null; pieces and, null or not,
//      warmup_chunks (varlen/work_item.cuh): state_in is the gradient behind a piece, state_out that in front of it. A
//      piece starts with an even chunk of its sequence, and has an even number of chunks unless it ends it.
// Out: d_initial_state, carried [slot,HV,128,128] float32, [K,V]; states, tokens, units (records). Every element of a
//      piece is written, nothing else.
// Grid, roles and ring: as in sm90_chain.cu; dO lies where the forward has v.
#include "tile/fused/prepare.cuh"
#include "tile/fused/record.cuh"
#include "tile/fused/state.cuh"

namespace {

constexpr bool kSaves = KDA_SAVES != 0;
static_assert(kReversed && kQueries);

// What a chunk adds to a column's norm at most, over the largest scale |dO|: one token's map does not lengthen it.
constexpr float kGrowth = kChunk;

// One chunk for a warpgroup's 64 columns. source: scale dO in the state's unit, rounded: the state's gradient before
// its decay, both as A fragments; X is left in `values` and the state's update under way. In the accumulators the
// value columns are rows and the tokens columns, so every product's result is, packed, the A operand of the next.
__device__ void step_back(State& state, const u32 (&rounded)[kSteps][4], const u32 (&source)[4], u32 slot,
                          u32 (&values)[4], int lane) {
    float product[8];
    wgmma_fence();
    wgmma(product, source, square_descriptor(slot, Slot::kAttend), false);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const int keys = Slot::kGate + (step >> 2) * Slot::kGateDistance + (step & 3) * 32;
        wgmma(product, rounded[step], rows_descriptor(slot, keys), true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    const Strengths strengths(slot, lane);
    u32 updates[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) updates[i] = pack_f16(product[2 * i], product[2 * i + 1]);

    float solved[8];
    wgmma_fence();
    wgmma(solved, updates, square_descriptor(slot, Slot::kSolve), false);
    wgmma_commit();
    wgmma_wait<0>();
    u32 negative[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 beta = strengths.of(i);
        values[i] = pack_f16(solved[2 * i], solved[2 * i + 1]);
        negative[i] = pack_f16(-beta.x * solved[2 * i], -beta.y * solved[2 * i + 1]);
    }
    wgmma_fence();
    wgmma_rows(state.value, source, columns_descriptor<Slot::kKeyDistance>(slot, Slot::kQuery));
    wgmma_rows(state.value, negative, columns_descriptor<Slot::kKeyDistance>(slot, Slot::kKey));
    wgmma_commit();
}

__device__ void carry(u32 shared, const Work& work, const States& states, const Records& records, float scale) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 out_place = hold_address(Slot::kValue + group * Slot::kValueDistance +
                                       SwizzledTile::step(SwizzledTile::columns_first(lane), warp, 0));

    State state;
    RingPlace<kSlots> place = {0, 0};
    Cursor cursor = Cursor::at_start(work);
    while (!cursor.done(work)) {
        const int first_column = cursor.split * kColumns + group * SwizzledTile::kColumns + warp * 16;
        state.begin(cursor, states, work.value_heads, first_column, lane);
        bool ends_tile = true;
        for (int chunk = cursor.chunks - 1; chunk >= 0; --chunk) {
            const u32 slot = shared + place.slot * Slot::kBytes;
            u32 raw[4], rounded[kSteps][4], source[4], values[4];
            state.look(chunk);
            wait(prepared_barrier(shared, place.slot), place.parity);
            ldmatrix_transposed(raw, slot + out_place);
            const float largest = largest_value(raw);
            state.keep_range(fabsf(scale) * largest, kGrowth);
            const float unit = scale * state.unit;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 x = Pair::unpack(raw[i]);
                source[i] = pack_f16(unit * x.x, unit * x.y);
            }
            state.round_and_decay(rounded, slot, lane);
            step_back(state, rounded, source, slot, values, lane);
            if constexpr (kSaves) {
                const i64 tile = cursor.piece.first_tile + chunk / kTileChunks;
                const RecordPlace record(records, tile * work.value_heads + cursor.head, Record::kBackwardUnits, first_column,
                                         lane);
                if (ends_tile) record.store_state(rounded, state.unit, lane);
                record.store_tokens(values, chunk % kTileChunks, state.unit, lane);
                if (lane == 0) {
                    record.units[(Record::kLargestOut + chunk % kTileChunks) * Record::kUnits] = largest;
                }
                ends_tile = chunk % kTileChunks == 0;
            }
            wgmma_wait<0>();
            mbarrier_arrive(released_barrier(shared, place.slot));
            place.advance(1);
        }
        state.end(cursor, states, work.value_heads, first_column, lane);
        cursor.chunk = 0;
        cursor.item += gridDim.x;
        cursor.open(work);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_backward_chain(const Element* q, const Element* k, const Element* d_out, const Element* g, const Element* beta,
                        const float* A_log, const float* dt_bias, const float* d_final_state, float* d_initial_state,
                        float* carried, u32* states, u32* tokens, float* units, const Piece* pieces,
                        const int* warmup_chunks, int items, int key_heads, int value_heads, int gate_form, int beta_form,
                        float lower_bound, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = hold_address(static_cast<u32>(__cvta_generic_to_shared(memory)));
    init_barriers(shared);

    const Work work = {pieces, warmup_chunks, items, key_heads, value_heads, kSize / kColumns};
    if (threadIdx.x < 32 * kCarryWarps) {
        take_registers<kCarryRegisters>();
        carry(shared, work, {d_final_state, d_initial_state, carried, nullptr}, {states, tokens, units}, scale);
    } else {
        give_registers<kPrepareRegisters>();
        const Inputs in = {q, k, d_out, g, beta, A_log, dt_bias, key_heads, value_heads, static_cast<GateForm>(gate_form),
                           static_cast<BetaForm>(beta_form), lower_bound};
        prepare(memory, shared, work, in);
    }
}
