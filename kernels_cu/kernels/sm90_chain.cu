// The fused chain for K = V = 128, 16-bit inputs, the `lower_bound` gate, normalised q and k and beta in [0, 2]:
// activation, chunk operands and the recurrence of one piece, value head and block of value columns in a thread block.
//
//   per chunk of 16 tokens, S [128, columns] carried from chunk to chunk in float32 registers:
//     gamma_i = sum of the log decays up to token i,  K+ = k e^gamma,  K- = k e^-gamma,  Q+ = q e^gamma
//     G = tril(K+ K-^T, -1),  P = tril(Q+ K-^T),  Nb = (I + Diag(beta) G)^-1 Diag(beta),  Kr = K- e^gamma_C
//     U = Nb (V - K+ S),  O = scale (Q+ S + P U),  S <- Diag(e^gamma_C) S + Kr^T U
//   The shared factor e^-gamma needs lower_bound >= -5: at most 80 nats in a chunk.
//
// KDA_OUTPUTS 1: reads all tokens and writes out and the last states.
// KDA_OUTPUTS 0: writes only what the pieces carry, the last state or (Carried::kTransition) the transition.
//
// In:  q, k [T,H,128], v [T,HV,128], g [T,HV,128], beta [T,HV] of one 16-bit type, contiguous, 16-byte aligned;
//      A_log [HV], dt_bias [HV,128] float32 or null; initial_state [N,HV,128,128] float32; pieces and, null or not,
//      warmup_chunks (varlen/work_item.cuh).
// Out: out [T,HV,128] of the inputs' type; final_state, carried [slot,HV,128,128] float32, [K,V]; transitions likewise,
//      [out,in]. Every element of a piece is written, nothing else.
// Grid: at most one block a multiprocessor, items dealt in turns; kThreads threads, Shared::kBytes of dynamic shared
// memory.
//
// One warpgroup for every 64 value columns carries the state, transposed: value columns are rows of the accumulators.
// Eight more warps prepare: chunk c belongs to preparation warp c % 8 and to slot c % kSlots of a ring. In a slot the
// raw q, k, g become Q+, K+, Kr in place (a warp owns its chunk's rows); v is overwritten by the outputs on their way
// out. Barriers of a slot, at which every lane concerned arrives: loaded (its copies have landed), prepared, released
// (the carrying warps are done, the slot may be loaded again). A warp that starts on chunk c issues the copies of
// chunk c + 4.
#include "common/gate.cuh"
#include "ptx/approximate.cuh"
#include "ptx/cp_async_zfill.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_tf32.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared_access.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "tile/general_mma.cuh"
#include "tile/half_pair.cuh"
#include "tile/swizzled_tile.cuh"
#include "tile/unit_inverse.cuh"
#include "varlen/work_item.cuh"

namespace {

using Pair = HalfPair<Element>;

constexpr bool kOutputs = KDA_OUTPUTS != 0;
constexpr BetaForm kBetaForm = static_cast<BetaForm>(KDA_BETA_FORM);
static_assert(kBetaForm != BetaForm::kValue, "the range of the float16 operands relies on beta in [0, 2]");

constexpr int kSize = 128;
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

// Gates are summed as 1024 sigma in float16: below one they would be subnormal for slow channels.
constexpr float kGateScale = 1024.0f;

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
    // The swizzle wants tiles at multiples of 1024 bytes.
    static constexpr int kBytes = (kDecay + 4 * kDecayStride * 4 + 1023) / 1024 * 1024;
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

struct Inputs {
    const Element* q;
    const Element* k;
    const Element* v;
    const Element* g;
    const Element* beta;
    const float* A_log;
    const float* dt_bias;
    int key_heads;
    int heads;
    float lower_bound;
};

// The copies of 16 rows of kTiles x 64 columns, a few rows a round; rows from `length` on become zeros (their addresses
// are then not read).
template <int kTiles>
struct RowCopy {
    static constexpr int kPieces = 8 * kTiles;
    static constexpr int kRows = 32 / kPieces;
    static constexpr int kRounds = 16 / kRows;

    u32 tiles;
    const Element* from;
    i64 stride;

    __device__ RowCopy(u32 tile, int distance, const Element* first, int row_elements, int lane)
        : tiles(tile + (lane % kPieces / 8) * distance),
          from(first + static_cast<i64>(lane / kPieces) * row_elements + 8 * (lane % kPieces)),
          stride(static_cast<i64>(kRows) * row_elements) {}

    __device__ void round(int i, int length, int lane) {
        const int row = i * kRows + lane / kPieces;
        cp_async_or_zero(tiles + SwizzledTile::piece(row, lane % 8), from, row < length);
        from += stride;
    }
};

__device__ void load_chunk(const Inputs& in, const Cursor& cursor, u32 slot, u32 loaded, int lane) {
    const i64 token = cursor.token();
    const int length = cursor.length();
    const int key_row = in.key_heads * kSize, value_row = in.heads * kSize;
    const i64 key_offset = (token * in.key_heads + cursor.key_head) * kSize;
    const i64 value_offset = (token * in.heads + cursor.head) * kSize;
    RowCopy<2> k(slot + Slot::kKey, Slot::kKeyDistance, in.k + key_offset, key_row, lane);
    RowCopy<2> g(slot + Slot::kGate, Slot::kGateDistance, in.g + value_offset, value_row, lane);
    RowCopy<2> q(slot + Slot::kQuery, Slot::kKeyDistance, in.q + key_offset, key_row, lane);
#pragma unroll
    for (int i = 0; i < RowCopy<2>::kRounds; ++i) {
        k.round(i, length, lane);
        g.round(i, length, lane);
        if constexpr (kOutputs) q.round(i, length, lane);
    }
    if (cursor.piece.carried == Carried::kState) {
        RowCopy<kGroups> v(slot + Slot::kValue, Slot::kValueDistance, in.v + value_offset + cursor.split * kColumns,
                           value_row, lane);
#pragma unroll
        for (int i = 0; i < RowCopy<kGroups>::kRounds; ++i) v.round(i, length, lane);
    }
    mbarrier_arrive_after_copies(loaded);
}

// log2 of the reciprocal norms of rows lane / 4 and lane / 4 + 8: the diagonal of x x^T.
__device__ float2 log2_norms(u32 tile, int lane) {
    float low[4] = {0.0f, 0.0f, 0.0f, 0.0f}, high[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        u32 a[4];
        ldmatrix(a, SwizzledTile::step(tile + SwizzledTile::rows_first(lane), step, Slot::kKeyDistance));
        // In halves: whole B fragments would have to be moved together first.
        Pair::multiply_half(low, a[0], a[1], a[0]);
        Pair::multiply_half(high, a[0], a[1], a[1]);
        Pair::multiply_half(low, a[2], a[3], a[2]);
        Pair::multiply_half(high, a[2], a[3], a[3]);
    }
    // Row g's square is in column g, held by lane g / 2 of the row's four.
    const int g = lane >> 2;
    const int owner = (lane & 28) | (g >> 1);
    const float x = __shfl_sync(0xffffffffu, (g & 1) ? low[1] : low[0], owner);
    const float y = __shfl_sync(0xffffffffu, (g & 1) ? high[3] : high[2], owner);
    return make_float2(-0.5f * lg2(x + kNormEpsilon), -0.5f * lg2(y + kNormEpsilon));
}

__device__ float activated_beta(float beta) {
    const float s = rcp(1.0f + ex2_flushed(-kLog2E * beta));
    return kBetaForm == BetaForm::kLogit ? s : 2.0f * s;
}

// 1024 sigma of two tokens of one channel, as one register of a B fragment.
__device__ u32 scaled_sigmoids(u32 raw, float rate, float bias) {
    const float2 g = Pair::unpack(raw);
    constexpr float kUnit = 1.0f / kGateScale;
    const float x = rcp(fmaf(ex2_flushed(fmaf(g.x, rate, bias)), kUnit, kUnit));
    const float y = rcp(fmaf(ex2_flushed(fmaf(g.y, rate, bias)), kUnit, kUnit));
    return pack_f16(x, y);
}

// Turns a loaded slot into operands. rate and bias give -log2(e) exp(A_log) (g + dt_bias); unit is the log2 decay of
// one unit of a summed gate; raw_beta is that of token lane % 16 if it exists, on its way from global memory.
__device__ void prepare_chunk(unsigned char* memory, u32 slot, const float* bias, float rate, float unit,
                              Element raw_beta, int length, float2 key_norm, float2 query_norm, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const u32 fragment = slot + SwizzledTile::rows_first(lane);

    // Row i of the first sums tokens 0 to i, every row of the second all of them.
    const u32 triangle = (2 * t <= g ? 0x3c00u : 0u) | (2 * t + 1 <= g ? 0x3c000000u : 0u);
    const u32 running[4] = {triangle, 0x3c003c00u, 0u, triangle};
    const u32 all[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};

    // Q+ leaves with q's own norm though its exponential carries k's.
    const float2 query_ratio =
        make_float2(ex2_flushed(query_norm.x - key_norm.x), ex2_flushed(query_norm.y - key_norm.y));

    float keys_low[4] = {}, keys_high[4] = {}, queries_low[4] = {}, queries_high[4] = {};
#pragma unroll kPrepareUnroll
    for (int step = 0; step < kSteps; ++step) {
        const u32 place = SwizzledTile::step(fragment, step, Slot::kKeyDistance);
        const u32 gate_place = SwizzledTile::step(fragment, step, Slot::kGateDistance) + Slot::kGate;
        u32 gates[4], keys[4], queries[4], keys_out[4];
        ldmatrix_transposed(gates, gate_place);
        ldmatrix(keys, place + Slot::kKey);
        if constexpr (kOutputs) ldmatrix(queries, place + Slot::kQuery);
        float decays[4];
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            const float channel_bias = bias[16 * step + 8 * group + g];
            const u32 early = scaled_sigmoids(gates[2 * group], rate, channel_bias);
            const u32 late = scaled_sigmoids(gates[2 * group + 1], rate, channel_bias);
            float sums[4] = {}, totals[4] = {};
            mma_f16(sums, running, early, late);
            mma_f16(totals, all, early, late);
            decays[2 * group] = ex2_flushed(unit * totals[0]);
            decays[2 * group + 1] = ex2_flushed(unit * totals[1]);

            // Column pair 2t, 2t + 1 of rows g (half 0) and g + 8 (half 1).
            float key_in[4], key_back[4], query_in[4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float norm = half == 0 ? key_norm.x : key_norm.y;
                const float grow_x = ex2_flushed(fmaf(-unit, sums[2 * half], norm));
                const float grow_y = ex2_flushed(fmaf(-unit, sums[2 * half + 1], norm));
                const float fall_x = ex2_flushed(fmaf(unit, sums[2 * half], norm));
                const float fall_y = ex2_flushed(fmaf(unit, sums[2 * half + 1], norm));
                const float2 key = Pair::unpack(keys[2 * group + half]);
                key_in[2 * half] = key.x * fall_x;
                key_in[2 * half + 1] = key.y * fall_y;
                key_back[2 * half] = key.x * grow_x;
                key_back[2 * half + 1] = key.y * grow_y;
                keys[2 * group + half] = pack_f16(key_in[2 * half], key_in[2 * half + 1]);
                keys_out[2 * group + half] =
                    pack_f16(key_back[2 * half] * decays[2 * group], key_back[2 * half + 1] * decays[2 * group + 1]);
                if constexpr (kOutputs) {
                    const float2 query = Pair::unpack(queries[2 * group + half]);
                    const float ratio = half == 0 ? query_ratio.x : query_ratio.y;
                    query_in[2 * half] = query.x * fall_x * ratio;
                    query_in[2 * half + 1] = query.y * fall_y * ratio;
                    queries[2 * group + half] = pack_f16(query_in[2 * half], query_in[2 * half + 1]);
                }
            }

            // The k index is free: slot t is channel 2t, slot t + 4 channel 2t + 1, as the lane holds them. Keys are
            // rounded, for equal keys round alike and errors of G would add up; of queries TF32 ignores the low bits.
            const u32 early_keys[2] = {round_tf32(key_back[0]), round_tf32(key_back[1])};
            const u32 late_keys[2] = {round_tf32(key_back[2]), round_tf32(key_back[3])};
            const u32 key_rows[4] = {round_tf32(key_in[0]), round_tf32(key_in[2]), round_tf32(key_in[1]),
                                     round_tf32(key_in[3])};
            mma_tf32(keys_low, key_rows, early_keys);
            mma_tf32(keys_high, key_rows, late_keys);
            if constexpr (kOutputs) {
                const u32 query_rows[4] = {__float_as_uint(query_in[0]), __float_as_uint(query_in[2]),
                                           __float_as_uint(query_in[1]), __float_as_uint(query_in[3])};
                mma_tf32(queries_low, query_rows, early_keys);
                mma_tf32(queries_high, query_rows, late_keys);
            }
        }
        stmatrix(place + Slot::kKey, keys);
        stmatrix(gate_place, keys_out);
        if constexpr (kOutputs) stmatrix(place + Slot::kQuery, queries);
        if (g == 0) {
            *reinterpret_cast<float4*>(memory + Slot::kDecay + 4 * (t * kDecayStride + 4 * step)) =
                make_float4(decays[0], decays[1], decays[2], decays[3]);
        }
    }

    const float beta = (lane & 15) < length ? activated_beta(to_float(raw_beta)) : 0.0f;
    // The solve uses nothing on or above the diagonal, so nothing is masked.
    const float beta_early = __shfl_sync(0xffffffffu, beta, g);
    const float beta_late = __shfl_sync(0xffffffffu, beta, g + 8);
    float2* lower = reinterpret_cast<float2*>(memory + Slot::kLower);
    lower[g * 8 + t] = make_float2(keys_low[0] * beta_early, keys_low[1] * beta_early);
    lower[(g + 8) * 8 + t] = make_float2(keys_low[2] * beta_late, keys_low[3] * beta_late);
    lower[(g + 8) * 8 + 4 + t] = make_float2(keys_high[2] * beta_late, keys_high[3] * beta_late);
    __syncwarp();
    float solve[16];
    unit_lower_inverse(solve, reinterpret_cast<const float*>(memory + Slot::kLower), lane);
    __syncwarp();
    if (lane < 16) {
#pragma unroll
        for (int row = 0; row < 16; ++row) {
            *reinterpret_cast<u16*>(memory + Slot::kSolve + BlockedSquare::at(row, lane)) =
                cvt_f16_f32(solve[row] * beta);
        }
    }
    if constexpr (kOutputs) {
        u32* attend = reinterpret_cast<u32*>(memory + Slot::kAttend) + lane;
        const bool first = 2 * t <= g, second = 2 * t + 1 <= g;
        attend[0] = pack_f16(first ? kRestored * queries_low[0] : 0.0f, second ? kRestored * queries_low[1] : 0.0f);
        attend[32] = 0;
        attend[64] = pack_f16(kRestored * queries_low[2], kRestored * queries_low[3]);
        attend[96] = pack_f16(first ? kRestored * queries_high[2] : 0.0f, second ? kRestored * queries_high[3] : 0.0f);
    }
}

__device__ void prepare(unsigned char* memory, u32 shared, const Work& work, const Inputs& in) {
    const int warp = threadIdx.x / 32 - kCarryWarps, lane = threadIdx.x % 32;
    float* bias = reinterpret_cast<float*>(memory + Shared::kBias) + warp * kSize;

    Cursor cursor = Cursor::at_start(work);
    RingPlace<kSlots> place = {warp, 0};
    const auto load = [&](const Cursor& ahead, const RingPlace<kSlots>& at) {
        if (ahead.done(work)) return;
        wait(released_barrier(shared, at.slot), at.parity ^ 1);
        load_chunk(in, ahead, shared + at.slot * Slot::kBytes, loaded_barrier(shared, at.slot), lane);
    };
    if (warp >= kLoadAhead) {
        cursor.advance(work, warp - kLoadAhead);
        load(cursor, {warp - kLoadAhead, 0});
        cursor.advance(work, kLoadAhead);
    } else {
        cursor.advance(work, warp);
    }

    int head = -1;
    float rate = 0.0f;
    const float unit = in.lower_bound * kLog2E / kGateScale;
    while (!cursor.done(work)) {
        const int length = cursor.length();
        // Of an existing token in any case, to need no branch.
        const Element raw_beta = in.beta[(cursor.token() + min(lane & 15, length - 1)) * in.heads + cursor.head];
        if (cursor.head != head) {
            head = cursor.head;
            // Not zero, so that the -inf of a missing token stays one.
            rate = -kLog2E * fmaxf(in.A_log != nullptr ? expf(in.A_log[head]) : 1.0f, 1e-30f);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kSize / 32; ++i) {
                const i64 channel = static_cast<i64>(head) * kSize + 32 * i + lane;
                bias[32 * i + lane] = in.dt_bias != nullptr ? rate * in.dt_bias[channel] : 0.0f;
            }
            __syncwarp();
        }

        unsigned char* slot_memory = memory + place.slot * Slot::kBytes;
        const u32 slot = shared + place.slot * Slot::kBytes;
        wait(loaded_barrier(shared, place.slot), place.parity);
        if (length < kChunk) {
            // A missing token has gate -inf: it decays nothing. Its k, q and beta are zero.
            constexpr u32 kFill = Pair::kMinusInfinity;
            const int half = lane / 16 * Slot::kGateDistance;
            for (int row = length + lane % 16 / 8; row < kChunk; row += 2) {
                *reinterpret_cast<uint4*>(slot_memory + Slot::kGate + half + SwizzledTile::piece(row, lane % 8)) =
                    make_uint4(kFill, kFill, kFill, kFill);
            }
            __syncwarp();
        }
        const float2 key_norm = log2_norms(slot + Slot::kKey, lane);
        const float2 query_norm = kOutputs ? log2_norms(slot + Slot::kQuery, lane) : make_float2(0.0f, 0.0f);
        Cursor ahead = cursor;
        RingPlace<kSlots> place_ahead = place;
        ahead.advance(work, kLoadAhead);
        place_ahead.advance(kLoadAhead);
        load(ahead, place_ahead);
        prepare_chunk(slot_memory, slot, bias, rate, unit, raw_beta, length, key_norm, query_norm, lane);
        fence_shared_for_wgmma();
        mbarrier_arrive(prepared_barrier(shared, place.slot));
        cursor.advance(work, kPrepareWarps);
        place.advance(kPrepareWarps);
    }
}

// Where the states of the launch lie.
struct States {
    const float* initial_state;
    float* final_state;
    float* carried;
    float* transitions;
};

// Largest value and state (a bound on a column's norm) in the units of the float16 operands; both keep U, at most
// beta (|v| + |S^T k|) with beta <= 2, below 65504.
constexpr float kLargestValue = 256.0f;
constexpr float kLargestBound = 16384.0f;
// Below this a column's operands would lose bits to subnormals.
constexpr float kSmallestBound = 1.0f / 64.0f;
constexpr float kMiddleBound = 64.0f;
constexpr float kRootSize = 11.3137085f;  // sqrt(kSize), rounded up
// Chunks from one look at the state to the next: halved in every chunk, it stays within float16 that long.
constexpr int kMeasureEvery = 16;
// What a chunk adds to a column's norm at most, over the largest |v|.
constexpr float kGrowth = 2.0f * kChunk;

__device__ float reciprocal_of_power(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }

__device__ float largest_of_warp(float x) {
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
}

__device__ int exponent_of(float x) { return static_cast<int>(__float_as_uint(x) >> 23) - 127; }

// A lane's part of the transposed state: element 4 group + i is value column first_column + lane / 4 (+ 8 for i >= 2),
// channel 8 group + 2 (lane % 4) (+ 1 for odd i). The registers hold the state times unit, a power of two; bound is at
// least the 2-norm of any of the warp's columns of registers.
struct State {
    float value[kSize / 2];
    float unit;
    float bound;

    template <typename Visit>
    __device__ void visit(int first_column, int lane, Visit&& at) {
#pragma unroll
        for (int i = 0; i < kSize / 2; ++i) {
            at(8 * (i / 4) + 2 * (lane & 3) + (i & 1), first_column + (lane >> 2) + 8 * ((i >> 1) & 1), value[i]);
        }
    }

    __device__ float largest() const {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < kSize / 2; ++i) most = fmaxf(most, fabsf(value[i]));
        return largest_of_warp(most);
    }

    // Where a piece's state comes from; null for zeros.
    __device__ static const float* source(const Cursor& cursor, const States& states, int heads) {
        const int from = cursor.piece.state_in;
        if (from == kNowhere) return nullptr;
        const float* buffer = from >= 0 ? states.carried : states.initial_state;
        return buffer + (static_cast<i64>(from >= 0 ? from : -1 - from) * heads + cursor.head) * kStateSize;
    }

    __device__ void begin(const Cursor& cursor, const States& states, int heads, int first_column, int lane) {
        const float* from = source(cursor, states, heads);
        if (cursor.piece.carried == Carried::kTransition) {
            visit(first_column, lane, [](int k, int v, float& x) { x = k == v ? 1.0f : 0.0f; });
        } else if (from == nullptr) {
            visit(first_column, lane, [](int, int, float& x) { x = 0.0f; });
        } else {
            visit(first_column, lane, [&](int k, int v, float& x) { x = from[k * kSize + v]; });
        }
        unit = 1.0f;
        measure();
    }

    // Bound and unit from the registers themselves.
    __device__ void measure() {
        bound = kRootSize * largest();
        if (bound > kLargestBound || (bound < kSmallestBound && bound > 0.0f)) center();
    }

    // Changes the unit, within [2^-100, 2^100], to bring the bound to the middle. Returns the factor.
    __device__ float center() {
        const int now = exponent_of(unit);
        const int wanted = max(-100, min(100, now + min(120, exponent_of(kMiddleBound) - exponent_of(bound))));
        const float factor = __uint_as_float(static_cast<u32>(127 + wanted - now) << 23);
#pragma unroll
        for (int i = 0; i < kSize / 2; ++i) value[i] *= factor;
        unit *= factor;
        bound *= factor;
        return factor;
    }

    __device__ void end(const Cursor& cursor, const States& states, int heads, int first_column, int lane) {
        const int to = cursor.piece.state_out;
        if (to == kNowhere) return;
        float* buffer = to < 0 ? states.final_state
                               : cursor.piece.carried == Carried::kTransition ? states.transitions : states.carried;
        float* target = buffer + (static_cast<i64>(to < 0 ? -1 - to : to) * heads + cursor.head) * kStateSize;
        const float restore = reciprocal_of_power(unit);
        visit(first_column, lane, [&](int k, int v, float& x) { target[k * kSize + v] = restore * x; });
    }
};

// Products of one chunk with the state: K+ S (columns 0 to 15, tokens) and Q+ S (columns 16 to 31), transposed.
constexpr int kProducts = kOutputs ? 16 : 8;

// The largest |v| of a warp's values, two a register.
__device__ float largest_value(const u32 (&values)[4]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) most = __vmaxu2(most, values[i] & 0x7fff7fffu);
    most = __reduce_max_sync(0xffffffffu, max(most & 0xffffu, most >> 16));
    return Pair::unpack(most).x;
}

// Changes the unit of the state, and of what has been computed from it, where the chunk's values (at most `value`) or
// the state have left the range of the operands. Exact: powers of two only.
__device__ void keep_range(State& state, float (&products)[kProducts], float value) {
    const float grown = fmaf(kGrowth * value, state.unit, state.bound);
    if (value * state.unit <= kLargestValue && grown <= kLargestBound && (grown >= kSmallestBound || grown == 0.0f)) {
        state.bound = grown;
        return;
    }
    // The products are of the state before its decay: what is left of it does not bound them, so never scale up by it.
    state.bound = grown < kSmallestBound
                      ? grown
                      : fmaxf(fmaf(kGrowth * value, state.unit, kRootSize * state.largest()), kMiddleBound);
    const float factor = state.center();
#pragma unroll
    for (int i = 0; i < kProducts; ++i) products[i] *= factor;
}

// Starts K+ S and Q+ S of a chunk for a warpgroup's 64 columns, and decays the state. In the accumulators the value
// columns are rows and the tokens columns, so every product's result is, packed, the A operand of the next.
__device__ void start_products(State& state, float (&products)[kProducts], u32 slot, int lane) {
    // Rounded and decayed before any product starts: the tensor cores own their registers while they run.
    u32 rounded[kSteps][4];
    const u32 decays = slot + Slot::kDecay + 4 * (lane & 3) * kDecayStride;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        float* x = state.value + 8 * step;
        const float4 decay = load_shared_float4(decays + 16 * step);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            rounded[step][i] = pack_f16(x[2 * i], x[2 * i + 1]);
            x[2 * i] *= i < 2 ? decay.x : decay.z;
            x[2 * i + 1] *= i < 2 ? decay.y : decay.w;
        }
    }
    constexpr u64 kRows = wgmma_layout(16, 8 * SwizzledTile::kRowBytes, true);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const int keys = Slot::kKey + (step >> 2) * Slot::kKeyDistance + (step & 3) * 32;
        wgmma(products, rounded[step], wgmma_descriptor(kRows, slot / 16 + keys / 16), step > 0);
    }
    wgmma_commit();
}

// The rest of the chunk, from its values (two a register, as in the A fragment): the state's update, which is still
// under way on return, and the outputs, two tokens a register.
__device__ void update_state(State& state, float (&products)[kProducts], const u32 (&values)[4], u32 slot, float scale,
                             u32 (&packed)[4]) {
    const float value = largest_value(values);
    wgmma_wait<0>();
    keep_range(state, products, value);

    constexpr u64 kSquare = wgmma_layout(BlockedSquare::kAlongRow, BlockedSquare::kAlongColumn, false);
    u32 residual[4], updates[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 v = Pair::unpack(values[i]);
        residual[i] = pack_f16(fmaf(v.x, state.unit, -products[2 * i]), fmaf(v.y, state.unit, -products[2 * i + 1]));
    }
    float update[8];
    wgmma_fence();
    wgmma(update, residual, wgmma_descriptor(kSquare, slot / 16 + Slot::kSolve / 16), false);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 4; ++i) updates[i] = pack_f16(update[2 * i], update[2 * i + 1]);

    float attended[8];
    wgmma_fence();
    if constexpr (kOutputs) {
        wgmma(attended, updates, wgmma_descriptor(kSquare, slot / 16 + Slot::kAttend / 16), false);
        wgmma_commit();
    }
    constexpr u64 kColumnsFirst = wgmma_layout(Slot::kGateDistance, 8 * SwizzledTile::kRowBytes, true);
    wgmma_rows(state.value, updates, wgmma_descriptor(kColumnsFirst, slot / 16 + Slot::kGate / 16));
    wgmma_commit();

    if constexpr (kOutputs) {
        wgmma_wait<1>();
        const float restore = scale * reciprocal_of_power(state.unit);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            packed[i] = Pair::pack(restore * (products[kProducts - 8 + 2 * i] + attended[2 * i]),
                                   restore * (products[kProducts - 7 + 2 * i] + attended[2 * i + 1]));
        }
    }
}

// The outputs of the chunk before, in its value tile: they leave for global memory, and the slot is released, while the
// next chunk's products run.
struct Outgoing {
    Element* target;  // the lane's 16 bytes
    int slot;         // number of the slot, kSlots when nothing is waiting
    int length;       // tokens from the chunk's start to the piece's end
};

__device__ void carry(u32 shared, const Work& work, const States& states, Element* out, float scale) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const u32 values_of_group = Slot::kValue + group * Slot::kValueDistance;
    const u32 value_place = values_of_group + SwizzledTile::step(SwizzledTile::columns_first(lane), warp, 0);
    // The eight lanes of one shared-memory access take rows whose pieces lie in different banks.
    const int store_row = ((lane >> 1 & 3) << 1) | ((lane >> 3) & 1) | ((lane >> 1) & 8);
    const u32 store_place = values_of_group + SwizzledTile::piece(store_row, 2 * warp + lane % 2);
    const i64 chunk_elements = static_cast<i64>(kChunk) * work.heads * kSize;

    State state;
    RingPlace<kSlots> place = {0, 0};
    Outgoing outgoing = {nullptr, kSlots, 0};
    const auto fetch = [&] { return load_shared_uint4(shared + outgoing.slot * Slot::kBytes + store_place); };
    const auto send = [&](uint4 outputs) {
        if (outgoing.slot == kSlots) return;
        if (store_row < outgoing.length) *reinterpret_cast<uint4*>(outgoing.target) = outputs;
        mbarrier_arrive(released_barrier(shared, outgoing.slot));
    };
    Cursor cursor = Cursor::at_start(work);
    while (!cursor.done(work)) {
        const int first_column = cursor.split * kColumns + group * SwizzledTile::kColumns + warp * 16;
        Element* target = out + (cursor.token() * work.heads + cursor.head) * kSize + first_column +
                          static_cast<i64>(store_row) * work.heads * kSize + lane % 2 * 8;
        const bool values = cursor.piece.carried == Carried::kState;
        state.begin(cursor, states, work.heads, first_column, lane);
        for (int left = cursor.piece.tokens; left > 0; left -= kChunk) {
            const u32 slot = shared + place.slot * Slot::kBytes;
            float products[kProducts];
            u32 raw[4] = {0, 0, 0, 0}, packed[4];
            if (left / kChunk % kMeasureEvery == 0) state.measure();
            wait(prepared_barrier(shared, place.slot), place.parity);
            // Asked for before the products start, to have arrived when they are under way.
            if (values) ldmatrix_transposed(raw, slot + value_place);
            uint4 outputs;
            if (kOutputs && outgoing.slot != kSlots) outputs = fetch();
            start_products(state, products, slot, lane);
            if constexpr (kOutputs) send(outputs);
            update_state(state, products, raw, slot, scale, packed);
            if constexpr (kOutputs) {
                // The warp's own columns of v have been read: the outputs take their place.
                stmatrix_transposed(slot + value_place, packed);
                __syncwarp();
                outgoing = {target, place.slot, left};
                target += chunk_elements;
            }
            wgmma_wait<0>();
            if constexpr (!kOutputs) mbarrier_arrive(released_barrier(shared, place.slot));
            place.advance(1);
        }
        state.end(cursor, states, work.heads, first_column, lane);
        cursor.chunk = 0;
        cursor.item += gridDim.x;
        cursor.open(work);
    }
    if (outgoing.slot != kSlots) send(fetch());
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_chain(const Element* q, const Element* k, const Element* v, const Element* g, const Element* beta,
               const float* A_log, const float* dt_bias, const float* initial_state, float* final_state,
               float* carried, float* transitions, Element* out, const Piece* pieces, const int* warmup_chunks,
               int items, int key_heads, int heads, float lower_bound, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = hold_address(static_cast<u32>(__cvta_generic_to_shared(memory)));
    if (threadIdx.x < kSlots) {
        mbarrier_init(loaded_barrier(shared, threadIdx.x), 32);
        mbarrier_init(prepared_barrier(shared, threadIdx.x), 32);
        mbarrier_init(released_barrier(shared, threadIdx.x), 32 * kCarryWarps);
    }
    __syncthreads();

    const Work work = {pieces, warmup_chunks, items, key_heads, heads, kSize / kColumns};
    if (threadIdx.x < 32 * kCarryWarps) {
        take_registers<kCarryRegisters>();
        const States states = {initial_state, final_state, carried, transitions};
        carry(shared, work, states, out, scale);
    } else {
        give_registers<kPrepareRegisters>();
        const Inputs in = {q, k, v, g, beta, A_log, dt_bias, key_heads, heads, lower_bound};
        prepare(memory, shared, work, in);
    }
}
