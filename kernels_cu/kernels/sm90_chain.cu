// The fused chain for K = V = 128, 16-bit inputs and the `lower_bound` gate: activation, chunk operands and the
// recurrence of one piece, value head and block of value columns in one thread block.
//
//   per chunk of 16 tokens, S [128, columns] carried from chunk to chunk in float32 registers:
//     gamma_i = sum of the log decays up to token i,  K+ = k e^gamma,  K- = k e^-gamma,  Q+ = q e^gamma
//     G = tril(K+ K-^T, -1),  P = tril(Q+ K-^T),  Nb = (I + Diag(beta) G)^-1 Diag(beta),  Kr = K- e^gamma_C
//     U = Nb (V - K+ S),  O = scale (Q+ S + P U),  S <- Diag(e^gamma_C) S + Kr^T U
//   with q and k normalised. The shared factor e^-gamma needs lower_bound >= -5: at most 80 nats in a chunk.
//
// KDA_OUTPUTS 1: reads all tokens and writes out and the last states.
// KDA_OUTPUTS 0: writes only what the pieces carry, the last state or (Carried::kTransition) the transition.
//
// In:  q, k [T,H,128], v [T,HV,128], g [T,HV,128], beta [T,HV] of one 16-bit type, contiguous, 16-byte aligned;
//      A_log [HV], dt_bias [HV,128] float32 or null; initial_state [N,HV,128,128] float32 or null (zeros), its strides
//      along K and V (in elements) state_stride_k and state_stride_v, 16384 a head; pieces and, null or not, warmup_chunks
//      (varlen/work_item.cuh).
// Out: out [T,HV,128] of the inputs' type, final_state float32 like initial_state, carried and transitions
//      [slot,HV,128,128] float32 ([K,V] and [out,in] order). Every element of a piece is written, nothing else.
// Grid: at most one block a multiprocessor, items dealt in turns: 384 threads, Shared::kBytes of dynamic shared memory.
//
// Warps 0 to 3 carry the state (columns of kOwn x 16 a warp, transposed: value columns are rows of the accumulators).
// Warps 4 to 11 prepare: chunk c belongs to preparation warp c % 8 and to slot c % kSlots of a ring. In a slot the raw
// q, k, g become Q+, K+, Kr in place (a warp owns its chunk's rows); v is overwritten by the outputs on their way out.
// Barriers of a slot, at which every lane concerned arrives: loaded (its copies have landed), prepared, released (the
// carrying warps are done, the slot may be loaded again). A warp that starts on chunk c issues the copies of chunk
// c + 4.
#include "common/gate.cuh"
#include "ptx/approximate.cuh"
#include "ptx/cp_async_zfill.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_tf32.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/half_pair.cuh"
#include "tile/swizzled_tile.cuh"
#include "tile/unit_inverse.cuh"
#include "varlen/work_item.cuh"

namespace {

using Pair = HalfPair<Element>;

constexpr bool kOutputs = KDA_OUTPUTS != 0;
constexpr bool kNormalise = KDA_NORMALISE != 0;
constexpr BetaForm kBetaForm = static_cast<BetaForm>(KDA_BETA_FORM);

constexpr int kSize = 128;
constexpr int kSteps = kSize / 16;
constexpr int kStateSize = kSize * kSize;

constexpr int kCarryWarps = 4;
constexpr int kPrepareWarps = 8;
constexpr int kThreads = 32 * (kCarryWarps + kPrepareWarps);
// Groups of 16 value columns a carrying warp owns, and the columns of a block.
constexpr int kOwn = KDA_COLUMNS / 64;
constexpr int kColumns = 64 * kOwn;
static_assert(kColumns == KDA_COLUMNS && (kOwn == 1 || kOwn == 2));

// One block a multiprocessor: 168 registers a thread at launch, then 8 x 32 x 144 + 4 x 32 x 216 = 12 x 32 x 168.
constexpr int kPrepareRegisters = 144;
constexpr int kCarryRegisters = 216;
static_assert(kPrepareWarps * kPrepareRegisters + kCarryWarps * kCarryRegisters == 168 * kThreads / 32);

// Steps of 16 channels laid out side by side: more hide more latency, fewer spare the instruction cache.
constexpr int kPrepareUnroll = KDA_PREPARE_UNROLL;

constexpr int kSlots = 12;
constexpr int kLoadAhead = 4;
static_assert(kSlots == kPrepareWarps + kLoadAhead, "the slot loaded for chunk c + 4 is the one of chunk c - 8");
static_assert(kLoadAhead * 2 == kPrepareWarps, "the first four chunks are loaded by the last four warps");

// Gates are summed as 1024 sigma in float16: below one they would be subnormal for slow channels.
constexpr float kGateScale = 1024.0f;

using KeyTile = SwizzledTile<kSize>;
using ValueTile = SwizzledTile<kColumns>;

// e^gamma_C in the order in which a carrying lane reads it: [lane % 4][step][group of 8 channels][2], padded.
constexpr int kDecayStride = 4 * kSteps + 4;

struct Slot {
    static constexpr int kQuery = 0;
    static constexpr int kKey = kQuery + KeyTile::kBytes;
    static constexpr int kGate = kKey + KeyTile::kBytes;
    static constexpr int kValue = kGate + KeyTile::kBytes;
    static constexpr int kSolve = kValue + SwizzledTile<kSize>::kBytes;
    static constexpr int kAttend = kSolve + BlockedSquare::kBytes;
    static constexpr int kDecay = kAttend + BlockedSquare::kBytes;
    // Tiles start at multiples of their row length.
    static constexpr int kBytes = (kDecay + 4 * kDecayStride * 4 + 255) / 256 * 256;
};

struct Shared {
    static constexpr int kLower = kSlots * Slot::kBytes;                 // Diag(beta) G, per preparation warp
    static constexpr int kBias = kLower + kPrepareWarps * 16 * 16 * 4;   // scaled dt_bias of its head, likewise
    static constexpr int kBarriers = kBias + kPrepareWarps * kSize * 4;  // loaded, prepared, released
    static constexpr int kBytes = kBarriers + 3 * kSlots * 8;
};
static_assert(Shared::kBytes <= 227 * 1024);
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

// Issues the copies of one 16-row tile, row by row behind each other; rows from `length` on become zeros (their
// addresses are then not read).
template <int kTileColumns>
struct TileCopy {
    static constexpr int kPieces = kTileColumns / 8;
    static constexpr int kRows = 32 / kPieces;
    static constexpr int kRounds = 16 / kRows;

    u32 tile;
    const Element* from;
    i64 stride;

    __device__ TileCopy(u32 tile, const Element* first, int row_elements, int lane)
        : tile(tile),
          from(first + static_cast<i64>(lane / kPieces) * row_elements + 8 * (lane % kPieces)),
          stride(static_cast<i64>(kRows) * row_elements) {}

    __device__ void round(int i, int length, int lane) {
        const int row = i * kRows + lane / kPieces;
        cp_async_or_zero(tile + SwizzledTile<kTileColumns>::piece(row, lane % kPieces), from, row < length);
        from += stride;
    }
};

__device__ void load_chunk(const Inputs& in, const Cursor& cursor, u32 slot, u32 loaded, int lane) {
    const i64 token = cursor.token();
    const int length = cursor.length();
    const int key_head = cursor.head / (in.heads / in.key_heads);
    const i64 key_offset = (token * in.key_heads + key_head) * kSize;
    const i64 value_offset = (token * in.heads + cursor.head) * kSize;
    TileCopy<kSize> k(slot + Slot::kKey, in.k + key_offset, in.key_heads * kSize, lane);
    TileCopy<kSize> g(slot + Slot::kGate, in.g + value_offset, in.heads * kSize, lane);
    TileCopy<kSize> q(slot + Slot::kQuery, in.q + key_offset, in.key_heads * kSize, lane);
#pragma unroll
    for (int i = 0; i < TileCopy<kSize>::kRounds; ++i) {
        k.round(i, length, lane);
        g.round(i, length, lane);
        if constexpr (kOutputs) q.round(i, length, lane);
    }
    if (cursor.piece.carried == Carried::kState) {
        TileCopy<kColumns> v(slot + Slot::kValue, in.v + value_offset + cursor.split * kColumns, in.heads * kSize,
                             lane);
#pragma unroll
        for (int i = 0; i < TileCopy<kColumns>::kRounds; ++i) v.round(i, length, lane);
    }
    mbarrier_arrive_after_copies(loaded);
}

// log2 of the reciprocal norms of rows lane / 4 and lane / 4 + 8: the diagonal of x x^T.
__device__ float2 log2_norms(u32 tile, int lane) {
    float low[4] = {0.0f, 0.0f, 0.0f, 0.0f}, high[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        u32 a[4];
        ldmatrix(a, KeyTile::at_step(tile + KeyTile::rows_first(lane), step));
        Pair::multiply(low, a, a[0], a[2]);
        Pair::multiply(high, a, a[1], a[3]);
    }
    // Row g's square is in column g, held by lane g / 2 of the row's four.
    const int g = lane >> 2;
    const int owner = (lane & 28) | (g >> 1);
    const float x = __shfl_sync(0xffffffffu, (g & 1) ? low[1] : low[0], owner);
    const float y = __shfl_sync(0xffffffffu, (g & 1) ? high[3] : high[2], owner);
    return make_float2(-0.5f * lg2(x + kNormEpsilon), -0.5f * lg2(y + kNormEpsilon));
}

__device__ float activated_beta(float beta) {
    if constexpr (kBetaForm == BetaForm::kValue) return beta;
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
// one unit of a summed gate; beta is that of token lane % 16, zero where there is none.
__device__ void prepare_chunk(unsigned char* memory, u32 slot, float* lower, const float* bias, float rate, float unit,
                              float beta, float2 key_norm, float2 query_norm, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const u32 fragment = slot + KeyTile::rows_first(lane);

    // Row i of the first sums tokens 0 to i, every row of the second all of them.
    const u32 triangle = (2 * t <= g ? 0x3c00u : 0u) | (2 * t + 1 <= g ? 0x3c000000u : 0u);
    const u32 running[4] = {triangle, 0x3c003c00u, 0u, triangle};
    const u32 all[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};

    // Q+ leaves with q's own norm though its exponential carries k's.
    const float2 query_ratio = make_float2(ex2_flushed(query_norm.x - key_norm.x), ex2_flushed(query_norm.y - key_norm.y));

    float keys_low[4] = {}, keys_high[4] = {}, queries_low[4] = {}, queries_high[4] = {};
#pragma unroll kPrepareUnroll
    for (int step = 0; step < kSteps; ++step) {
        const u32 place = KeyTile::at_step(fragment, step);
        u32 gates[4], keys[4], queries[4], keys_out[4];
        ldmatrix_transposed(gates, place + Slot::kGate);
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

            // The k index is free: slot t is channel 2t, slot t + 4 channel 2t + 1, as the lane holds them. The
            // unrounded registers are taken: TF32 ignores the low bits.
            const u32 early_keys[2] = {__float_as_uint(key_back[0]), __float_as_uint(key_back[1])};
            const u32 late_keys[2] = {__float_as_uint(key_back[2]), __float_as_uint(key_back[3])};
            const u32 key_rows[4] = {__float_as_uint(key_in[0]), __float_as_uint(key_in[2]),
                                     __float_as_uint(key_in[1]), __float_as_uint(key_in[3])};
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
        stmatrix(place + Slot::kGate, keys_out);
        if constexpr (kOutputs) stmatrix(place + Slot::kQuery, queries);
        if (g == 0) {
            *reinterpret_cast<float4*>(memory + Slot::kDecay + 4 * (t * kDecayStride + 4 * step)) =
                make_float4(decays[0], decays[1], decays[2], decays[3]);
        }
    }

    const int column = 2 * t;
    if constexpr (kOutputs) {
        u32* attend = reinterpret_cast<u32*>(memory + Slot::kAttend) + lane;
        const bool first = column <= g, second = column + 1 <= g;
        attend[0] = pack_f16(first ? queries_low[0] : 0.0f, second ? queries_low[1] : 0.0f);
        attend[32] = 0;
        attend[64] = pack_f16(queries_low[2], queries_low[3]);
        attend[96] = pack_f16(first ? queries_high[2] : 0.0f, second ? queries_high[3] : 0.0f);
    }

    // The solve uses nothing on or above the diagonal, so nothing is masked.
    const float beta_early = __shfl_sync(0xffffffffu, beta, g);
    const float beta_late = __shfl_sync(0xffffffffu, beta, g + 8);
    float2* rows = reinterpret_cast<float2*>(lower);
    rows[g * 8 + t] = make_float2(keys_low[0] * beta_early, keys_low[1] * beta_early);
    rows[(g + 8) * 8 + t] = make_float2(keys_low[2] * beta_late, keys_low[3] * beta_late);
    rows[(g + 8) * 8 + 4 + t] = make_float2(keys_high[2] * beta_late, keys_high[3] * beta_late);
    __syncwarp();
    float solve[16];
    unit_lower_inverse(solve, lower, lane);
    if (lane < 16) {
#pragma unroll
        for (int row = 0; row < 16; ++row) {
            *reinterpret_cast<u16*>(memory + Slot::kSolve + BlockedSquare::at(row, lane)) =
                cvt_f16_f32(solve[row] * beta);
        }
    }
}

__device__ void prepare(unsigned char* memory, u32 shared, const Work& work, const Inputs& in) {
    const int warp = threadIdx.x / 32 - kCarryWarps, lane = threadIdx.x % 32;
    float* lower = reinterpret_cast<float*>(memory + Shared::kLower) + warp * 16 * 16;
    float* bias = reinterpret_cast<float*>(memory + Shared::kBias) + warp * kSize;

    Cursor cursor = Cursor::at_start(work);
    Cursor next = cursor;
    RingPlace<kSlots> place = {warp, 0}, next_place = {(warp + kLoadAhead) % kPrepareWarps, 0};
    cursor.advance(work, place.slot);
    next.advance(work, next_place.slot);
    const auto load_next = [&] {
        if (next.done(work)) return;
        wait(released_barrier(shared, next_place.slot), next_place.parity ^ 1);
        load_chunk(in, next, shared + next_place.slot * Slot::kBytes, loaded_barrier(shared, next_place.slot), lane);
        next.advance(work, kPrepareWarps);
        next_place.advance(kPrepareWarps);
    };
    if (warp >= kLoadAhead) load_next();

    int head = -1;
    float rate = 0.0f;
    const float unit = in.lower_bound * kLog2E / kGateScale;
    while (!cursor.done(work)) {
        const int length = cursor.length();
        float raw_beta = 0.0f;
        const int token = lane & 15;
        if (token < length) raw_beta = to_float(in.beta[(cursor.token() + token) * in.heads + cursor.head]);
        if (cursor.head != head) {
            head = cursor.head;
            // Not zero, so that the -inf of a missing token stays one.
            rate = -kLog2E * fmaxf(in.A_log != nullptr ? expf(in.A_log[head]) : 1.0f, 1e-30f);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kSize / 32; ++i) {
                const int channel = 32 * i + lane;
                bias[channel] = in.dt_bias != nullptr ? rate * in.dt_bias[static_cast<i64>(head) * kSize + channel] : 0.0f;
            }
            __syncwarp();
        }

        unsigned char* slot_memory = memory + place.slot * Slot::kBytes;
        const u32 slot = shared + place.slot * Slot::kBytes;
        wait(loaded_barrier(shared, place.slot), place.parity);
        if (length < kChunk) {
            // A missing token has gate -inf: it decays nothing. Its k, q and beta are zero.
            for (int i = lane; i < (kChunk - length) * (KeyTile::kRowBytes / 16); i += 32) {
                constexpr u32 kFill = Pair::kMinusInfinity;
                reinterpret_cast<uint4*>(slot_memory + Slot::kGate + length * KeyTile::kRowBytes)[i] =
                    make_uint4(kFill, kFill, kFill, kFill);
            }
            __syncwarp();
        }
        float2 key_norm = make_float2(0.0f, 0.0f), query_norm = key_norm;
        if constexpr (kNormalise) {
            key_norm = log2_norms(slot + Slot::kKey, lane);
            if constexpr (kOutputs) query_norm = log2_norms(slot + Slot::kQuery, lane);
        }
        load_next();
        prepare_chunk(slot_memory, slot, lower, bias, rate, unit, token < length ? activated_beta(raw_beta) : 0.0f,
                      key_norm, query_norm, lane);
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
    i64 stride_k;
    i64 stride_v;
};

// The lane's part of the transposed state: value column first_column + 16 own + lane / 4 (+ 8 in elements 2 and 3),
// channel 8 group + 2 (lane % 4) (+ 1 in elements 1 and 3).
struct State {
    float value[kOwn][kSize / 8][4];

    template <typename Visit>
    __device__ void visit(int first_column, int lane, Visit&& at) {
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
#pragma unroll
            for (int group = 0; group < kSize / 8; ++group) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    at(8 * group + 2 * (lane & 3) + (i & 1), first_column + 16 * own + (lane >> 2) + 8 * (i >> 1),
                       value[own][group][i]);
                }
            }
        }
    }

    __device__ void begin(const Cursor& cursor, const States& states, int heads, int first_column, int lane) {
        const int from = cursor.piece.state_in;
        const float* source = nullptr;
        i64 stride_k = kSize, stride_v = 1;
        if (from >= 0) {
            source = states.carried + (static_cast<i64>(from) * heads + cursor.head) * kStateSize;
        } else if (from != kNowhere && states.initial_state != nullptr) {
            source = states.initial_state + (static_cast<i64>(-1 - from) * heads + cursor.head) * kStateSize;
            stride_k = states.stride_k;
            stride_v = states.stride_v;
        }
        if (cursor.piece.carried == Carried::kTransition) {
            visit(first_column, lane, [](int k, int v, float& x) { x = k == v ? 1.0f : 0.0f; });
        } else if (source == nullptr) {
            visit(first_column, lane, [](int, int, float& x) { x = 0.0f; });
        } else {
            visit(first_column, lane, [&](int k, int v, float& x) { x = source[k * stride_k + v * stride_v]; });
        }
    }

    __device__ void end(const Cursor& cursor, const States& states, int heads, int first_column, int lane) {
        const int to = cursor.piece.state_out;
        if (to == kNowhere) return;
        float* target;
        i64 stride_k = kSize, stride_v = 1;
        if (to < 0) {
            target = states.final_state + (static_cast<i64>(-1 - to) * heads + cursor.head) * kStateSize;
            stride_k = states.stride_k;
            stride_v = states.stride_v;
        } else {
            float* buffer = cursor.piece.carried == Carried::kTransition ? states.transitions : states.carried;
            target = buffer + (static_cast<i64>(to) * heads + cursor.head) * kStateSize;
        }
        visit(first_column, lane, [&](int k, int v, float& x) { target[k * stride_k + v * stride_v] = x; });
    }
};

// One chunk of the recurrence for a warp's columns. In its accumulators the value columns are rows and the tokens
// columns, so every product's result is, packed, the A operand of the next.
__device__ void carry_chunk(State& state, const unsigned char* memory, u32 slot, bool values, int warp, float scale,
                            int lane) {
    const int t = lane & 3;
    const u32 row_operand = slot + KeyTile::columns_first(lane);
    const u32 column_operand = slot + KeyTile::rows_first(lane);

    float kept[kOwn][2][4] = {}, outputs[kOwn][2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        u32 keys[4], queries[4];
        ldmatrix(keys, KeyTile::at_step(row_operand, step) + Slot::kKey);
        if constexpr (kOutputs) ldmatrix(queries, KeyTile::at_step(row_operand, step) + Slot::kQuery);
        const float4 decay =
            *reinterpret_cast<const float4*>(memory + Slot::kDecay + 4 * (t * kDecayStride + 4 * step));
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            float(&first)[4] = state.value[own][2 * step];
            float(&second)[4] = state.value[own][2 * step + 1];
            const u32 rounded[4] = {pack_f16(first[0], first[1]), pack_f16(first[2], first[3]),
                                    pack_f16(second[0], second[1]), pack_f16(second[2], second[3])};
            mma_f16(kept[own][0], rounded, keys[0], keys[1]);
            mma_f16(kept[own][1], rounded, keys[2], keys[3]);
            if constexpr (kOutputs) {
                mma_f16(outputs[own][0], rounded, queries[0], queries[1]);
                mma_f16(outputs[own][1], rounded, queries[2], queries[3]);
            }
            first[0] *= decay.x;
            first[1] *= decay.y;
            first[2] *= decay.x;
            first[3] *= decay.y;
            second[0] *= decay.z;
            second[1] *= decay.w;
            second[2] *= decay.z;
            second[3] *= decay.w;
        }
    }

    u32 solve[4], attend[4];
    ldmatrix(solve, slot + Slot::kSolve + 16 * lane);
    if constexpr (kOutputs) ldmatrix(attend, slot + Slot::kAttend + 16 * lane);
    u32 updates[kOwn][4];
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
        u32 raw[4] = {0, 0, 0, 0}, residual[4];
        const u32 place = ValueTile::at_step(slot + Slot::kValue + ValueTile::columns_first(lane), warp * kOwn + own);
        if (values) ldmatrix_transposed(raw, place);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 v = Pair::unpack(raw[i]);
            residual[i] = pack_f16(v.x - kept[own][i >> 1][2 * (i & 1)], v.y - kept[own][i >> 1][2 * (i & 1) + 1]);
        }
        float update[2][4] = {};
        mma_f16(update[0], residual, solve[0], solve[1]);
        mma_f16(update[1], residual, solve[2], solve[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            updates[own][i] = pack_f16(update[i >> 1][2 * (i & 1)], update[i >> 1][2 * (i & 1) + 1]);
        }
    }

#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        u32 keys_out[4];
        ldmatrix_transposed(keys_out, KeyTile::at_step(column_operand, step) + Slot::kGate);
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            mma_f16(state.value[own][2 * step], updates[own], keys_out[0], keys_out[1]);
            mma_f16(state.value[own][2 * step + 1], updates[own], keys_out[2], keys_out[3]);
        }
    }

    if constexpr (kOutputs) {
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
            mma_f16(outputs[own][0], updates[own], attend[0], attend[1]);
            mma_f16(outputs[own][1], updates[own], attend[2], attend[3]);
            u32 packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                packed[i] = Pair::pack(scale * outputs[own][i >> 1][2 * (i & 1)],
                                       scale * outputs[own][i >> 1][2 * (i & 1) + 1]);
            }
            // The warp's own columns of v have been read: the outputs take their place.
            stmatrix_transposed(
                ValueTile::at_step(slot + Slot::kValue + ValueTile::columns_first(lane), warp * kOwn + own), packed);
        }
    }
}

// Sends a warp's columns of the outputs from the value tile to global memory.
__device__ void store_outputs(const unsigned char* memory, Element* out, int row_elements, int length, int warp,
                              int lane) {
    constexpr int kPieces = 2 * kOwn;
    const int piece = lane % kPieces;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        // The eight lanes of one shared-memory access take rows whose pieces lie in different banks.
        const int place = lane / kPieces;
        const int row = kOwn == 2 ? 8 * i + ((place >> 1) | ((place & 1) << 2))
                                  : ((place & 3) << 1) | ((place >> 2) & 1) | (place & 8);
        const uint4 packed = *reinterpret_cast<const uint4*>(memory + Slot::kValue +
                                                             ValueTile::piece(row, warp * kPieces + piece));
        if (row < length) {
            *reinterpret_cast<uint4*>(out + static_cast<i64>(row) * row_elements + piece * 8) = packed;
        }
    }
}

__device__ void carry(unsigned char* memory, u32 shared, const Work& work, const States& states, Element* out,
                      float scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    State state;
    RingPlace<kSlots> place = {0, 0};
    Cursor cursor = Cursor::at_start(work);
    while (!cursor.done(work)) {
        const int first_column = cursor.split * kColumns + warp * kOwn * 16;
        const bool values = cursor.piece.carried == Carried::kState;
        state.begin(cursor, states, work.heads, first_column, lane);
        for (cursor.chunk = 0; cursor.chunk < cursor.chunks; ++cursor.chunk) {
            unsigned char* slot_memory = memory + place.slot * Slot::kBytes;
            wait(prepared_barrier(shared, place.slot), place.parity);
            carry_chunk(state, slot_memory, shared + place.slot * Slot::kBytes, values, warp, scale, lane);
            if constexpr (kOutputs) {
                __syncwarp();
                store_outputs(slot_memory, out + (cursor.token() * work.heads + cursor.head) * kSize + first_column,
                              work.heads * kSize, cursor.length(), warp, lane);
            }
            mbarrier_arrive(released_barrier(shared, place.slot));
            place.advance(1);
        }
        state.end(cursor, states, work.heads, first_column, lane);
        cursor.chunk = 0;
        cursor.item += gridDim.x;
        cursor.open(work);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_chain(const Element* q, const Element* k, const Element* v, const Element* g, const Element* beta,
               const float* A_log, const float* dt_bias, const float* initial_state, float* final_state,
               float* carried, float* transitions, Element* out, const Piece* pieces, const int* warmup_chunks, int items,
               int key_heads, int heads, float lower_bound, float scale, i64 state_stride_k, i64 state_stride_v) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = static_cast<u32>(__cvta_generic_to_shared(memory));
    if (threadIdx.x < kSlots) {
        mbarrier_init(loaded_barrier(shared, threadIdx.x), 32);
        mbarrier_init(prepared_barrier(shared, threadIdx.x), 32);
        mbarrier_init(released_barrier(shared, threadIdx.x), 32 * kCarryWarps);
    }
    __syncthreads();

    const Work work = {pieces, warmup_chunks, items, heads, kSize / kColumns};
    if (threadIdx.x < 32 * kCarryWarps) {
        take_registers<kCarryRegisters>();
        const States states = {initial_state, final_state, carried, transitions, state_stride_k, state_stride_v};
        carry(memory, shared, work, states, out, scale);
    } else {
        give_registers<kPrepareRegisters>();
        const Inputs in = {q, k, v, g, beta, A_log, dt_bias, key_heads, heads, lower_bound};
        prepare(memory, shared, work, in);
    }
}
