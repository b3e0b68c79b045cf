// The preparing warps of a chain kernel: copies of raw tokens into the ring, activation, chunk operands.
//
//   gamma_i = sum of the log decays up to token i,  K+ = k e^gamma,  K- = k e^-gamma,  Q+ = q e^gamma
//   G = tril(K+ K-^T, -1),  P = tril(Q+ K-^T),  N = (I + Diag(beta) G)^-1,  Kr = K- e^gamma_C
//   The triangles take their decays as factors (tile/fused/triangles.cuh): from the chunk's start with a bounded gate,
//   which spans 80 nats at most; else from the chunk's middle, and level by level where that spans too much.
//
// N and P are left in a slot as they stand, or (kReversed) transposed.
#pragma once

#include "common/warp.cuh"
#include "ptx/copy.cuh"
#include "ptx/matrix.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fused/triangles.cuh"
#include "tile/fused/unit_inverse.cuh"
#include "tile/shared/norm.cuh"

struct Inputs {
    const Element* q;
    const Element* k;
    const Element* v;
    const Element* g;
    const Element* beta;
    const float* A_log;
    const float* dt_bias;
    int key_heads;
    int value_heads;
    GateForm gate_form;
    BetaForm beta_form;
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
    const int key_row = in.key_heads * kSize, value_row = in.value_heads * kSize;
    const i64 key_offset = (token * in.key_heads + cursor.key_head) * kSize;
    const i64 value_offset = (token * in.value_heads + cursor.head) * kSize;
    RowCopy<2> k(slot + Slot::kKey, Slot::kKeyDistance, in.k + key_offset, key_row, lane);
    RowCopy<2> g(slot + Slot::kGate, Slot::kGateDistance, in.g + value_offset, value_row, lane);
    RowCopy<2> q(slot + Slot::kQuery, Slot::kKeyDistance, in.q + key_offset, key_row, lane);
#pragma unroll
    for (int i = 0; i < RowCopy<2>::kRounds; ++i) {
        k.round(i, length, lane);
        g.round(i, length, lane);
        if constexpr (kQueries) q.round(i, length, lane);
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
    const float x = __shfl_sync(kAllLanes, (g & 1) ? low[1] : low[0], owner);
    const float y = __shfl_sync(kAllLanes, (g & 1) ? high[3] : high[2], owner);
    return make_float2(log2_reciprocal_norm(x), log2_reciprocal_norm(y));
}

// The same where squares overflow: of the rows of which `norm` says so.
__device__ void find_large_norms(u32 tile, float2& norm, int lane) {
    float squares[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
        u32 rows[4];
        ldmatrix(rows, SwizzledTile::step(tile + SwizzledTile::rows_first(lane), step, Slot::kKeyDistance));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 x = Pair::unpack(rows[i]);
            squares[i % 2] = fmaf(kShrink * x.x, kShrink * x.x, squares[i % 2]);
            squares[i % 2] = fmaf(kShrink * x.y, kShrink * x.y, squares[i % 2]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        squares[i] += __shfl_xor_sync(kAllLanes, squares[i], 1);
        squares[i] += __shfl_xor_sync(kAllLanes, squares[i], 2);
    }
    if (isinf(norm.x)) norm.x = log2_reciprocal_norm_of_shrunk(squares[0]);
    if (isinf(norm.y)) norm.y = log2_reciprocal_norm_of_shrunk(squares[1]);
}

// Rows of norms far above 1 would leave float32 on the way: factors hold the norm's reciprocal beside a decay.
constexpr float kSmallestLogNorm = -8.0f;
// A power of two that is not subnormal.
constexpr float kSmallestShift = -120.0f;

// Brings large rows of a tile near norm 1, by powers of two, and their log2 reciprocal norms along.
__device__ void shrink_rows(u32 tile, float2& norm, int lane) {
    if (!__any_sync(kAllLanes, fminf(norm.x, norm.y) < kSmallestLogNorm)) return;
    if (__any_sync(kAllLanes, isinf(norm.x) || isinf(norm.y))) find_large_norms(tile, norm, lane);
    const float2 shift = make_float2(fminf(fmaxf(ceilf(norm.x), kSmallestShift), 0.0f),
                                     fminf(fmaxf(ceilf(norm.y), kSmallestShift), 0.0f));
    norm.x -= shift.x, norm.y -= shift.y;
    const float factor[2] = {ex2_flushed(shift.x), ex2_flushed(shift.y)};
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
        const u32 place = SwizzledTile::step(tile + SwizzledTile::rows_first(lane), step, Slot::kKeyDistance);
        u32 rows[4];
        ldmatrix(rows, place);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 x = Pair::unpack(rows[i]);
            rows[i] = Pair::pack(factor[i % 2] * x.x, factor[i % 2] * x.y);
        }
        stmatrix(place, rows);
    }
    __syncwarp();
}

// What the operands' factors need beside the gates: log2 reciprocal norms of keys, those of queries over them, of rows
// lane / 4 and lane / 4 + 8; log2 decay of a gate's unit.
struct Norms {
    float2 key, query_ratio;
    float unit;
};

// K+, Q+, Kr and e^gamma_C of a slot, and its triangles. kFar: of a chunk whose gates are activated and span more than
// factors from its start do; levels: more than those from its middle do, too. activate: of a register of raw gates.
template <bool kFar, typename Activate>
__device__ Triangles make_operands(unsigned char* memory, u32 slot, const Norms& norms, bool levels, int lane,
                                   Activate&& activate) {
    const int g = lane >> 2, t = lane & 3;
    const u32 fragment = slot + SwizzledTile::rows_first(lane);
    const float unit = norms.unit;

    // Row i of the first sums tokens 0 to i, every row of the second all of them.
    const u32 triangle = (2 * t <= g ? 0x3c00u : 0u) | (2 * t + 1 <= g ? 0x3c000000u : 0u);
    const u32 running[4] = {triangle, 0x3c003c00u, 0u, triangle};
    const u32 all[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};

    Triangles triangles;
    // Far: how the decays behind a token are summed, and the share of a channel's units before the factors' place.
    u32 back[4];
    float back_unit, place_unit;
    if constexpr (kFar) {
        if (levels) triangles.multiply_deep(slot, unit, norms.key, norms.query_ratio, lane);
        // Row i sums the tokens behind i to the chunk's end, or those up to i to be taken from what is before the middle.
        const u32 later = triangle ^ 0x3c003c00u;
        back[0] = levels ? later : running[0], back[1] = levels ? 0u : running[1];
        back[2] = levels ? 0x3c003c00u : running[2], back[3] = levels ? later : running[3];
        back_unit = levels ? unit : -unit;
        place_unit = levels ? 0.0f : 0.5f * unit;
    }
#pragma unroll kPrepareUnroll
    for (int step = 0; step < kSteps; ++step) {
        const u32 place = SwizzledTile::step(fragment, step, Slot::kKeyDistance);
        const u32 gate_place = SwizzledTile::step(fragment, step, Slot::kGateDistance) + Slot::kGate;
        u32 gates[4], keys[4], queries[4], keys_out[4];
        ldmatrix_transposed(gates, gate_place);
        ldmatrix(keys, place + Slot::kKey);
        if constexpr (kQueries) ldmatrix(queries, place + Slot::kQuery);
        float decays[4];
#pragma unroll
        for (int group = 0; group < 2; ++group) {
            const int channel = 16 * step + 8 * group + g;
            const u32 early = activate(gates[2 * group], channel), late = activate(gates[2 * group + 1], channel);
            float sums[4] = {}, totals[4] = {}, backs[4] = {};
            mma_f16(sums, running, early, late);
            mma_f16(totals, all, early, late);
            decays[2 * group] = ex2_flushed(unit * totals[0]);
            decays[2 * group + 1] = ex2_flushed(unit * totals[1]);
            // log2 decay up to the place that factors count from, and what is left of it to the chunk's end.
            float2 middle = make_float2(0.0f, 0.0f), rest = make_float2(decays[2 * group], decays[2 * group + 1]);
            if constexpr (kFar) {
                mma_f16(backs, back, early, late);
                middle = make_float2(place_unit * totals[0], place_unit * totals[1]);
                rest = make_float2(ex2_flushed(middle.x), ex2_flushed(middle.y));
            }

            // Column pair 2t, 2t + 1 of rows g (half 0) and g + 8 (half 1).
            float key_in[4], key_back[4], query_in[4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float norm = half == 0 ? norms.key.x : norms.key.y;
                const float* from = kFar ? backs : sums;
                const float grow_unit = kFar ? back_unit : -unit;
                // Not with a middle of 0 where there is none: the compiler could not leave out the sum.
                const float2 up = kFar ? make_float2(norm + middle.x, norm + middle.y) : make_float2(norm, norm);
                const float2 down = kFar ? make_float2(norm - middle.x, norm - middle.y) : make_float2(norm, norm);
                const float grow_x = ex2_flushed(fmaf(grow_unit, from[2 * half], up.x));
                const float grow_y = ex2_flushed(fmaf(grow_unit, from[2 * half + 1], up.y));
                const float fall_x = ex2_flushed(fmaf(unit, sums[2 * half], down.x));
                const float fall_y = ex2_flushed(fmaf(unit, sums[2 * half + 1], down.y));
                const float2 key = Pair::unpack(keys[2 * group + half]);
                key_in[2 * half] = key.x * fall_x;
                key_in[2 * half + 1] = key.y * fall_y;
                key_back[2 * half] = key.x * grow_x;
                key_back[2 * half + 1] = key.y * grow_y;
                // To the place from the chunk's start: not far, it is the start.
                const float2 whole = kFar ? rest : make_float2(1.0f, 1.0f);
                keys[2 * group + half] = pack_f16(whole.x * key_in[2 * half], whole.y * key_in[2 * half + 1]);
                keys_out[2 * group + half] = pack_f16(rest.x * key_back[2 * half], rest.y * key_back[2 * half + 1]);
                if constexpr (kQueries) {
                    const float2 query = Pair::unpack(queries[2 * group + half]);
                    const float ratio = half == 0 ? norms.query_ratio.x : norms.query_ratio.y;
                    query_in[2 * half] = query.x * (fall_x * ratio);
                    query_in[2 * half + 1] = query.y * (fall_y * ratio);
                    queries[2 * group + half] = pack_f16(whole.x * query_in[2 * half], whole.y * query_in[2 * half + 1]);
                }
            }
            if (!kFar || !levels) triangles.add(key_in, key_back, query_in);
        }
        stmatrix(place + Slot::kKey, keys);
        stmatrix(gate_place, keys_out);
        if constexpr (kQueries) stmatrix(place + Slot::kQuery, queries);
        if (g == 0) {
            *reinterpret_cast<float4*>(memory + Slot::kDecay + 4 * (t * kDecayStride + 4 * step)) =
                make_float4(decays[0], decays[1], decays[2], decays[3]);
        }
    }
    return triangles;
}

// A function of its own: few chunks are far, and the others keep registers and instruction cache for themselves.
__device__ __noinline__ Triangles make_far_operands(unsigned char* memory, u32 slot, Norms norms, bool levels, int lane) {
    return make_operands<true>(memory, slot, norms, levels, lane, [](u32 units, int) { return units; });
}

// Turns a loaded slot into operands. bias: of all channels, scaled; raw_beta is that of token lane % 16 if it exists, on
// its way from global memory; strength: activates it.
__device__ void prepare_chunk(unsigned char* memory, u32 slot, const float* bias, const Gates& head, Element raw_beta,
                              const Strength& strength, int length, float2 key_norm, float2 query_norm, int lane) {
    shrink_rows(slot + Slot::kKey, key_norm, lane);
    if constexpr (kQueries) shrink_rows(slot + Slot::kQuery, query_norm, lane);
    const int g = lane >> 2, t = lane & 3;

    // Q+ leaves with q's own norm though its exponential carries k's.
    const Norms norms = {
        key_norm, make_float2(ex2_flushed(query_norm.x - key_norm.x), ex2_flushed(query_norm.y - key_norm.y)),
        head.unit};
    Triangles triangles;
    if constexpr (kBounded) {
        triangles = make_operands<false>(memory, slot, norms, false, lane, [&](u32 raw, int channel) {
            return head.pair(raw, bias[channel]);
        });
    } else {
        const float most = activate_gates(slot, head, bias, lane);
        if (__any_sync(kAllLanes, most > kMostFromStart)) {
            triangles = make_far_operands(memory, slot, norms, __any_sync(kAllLanes, most > kMostFromMiddle), lane);
        } else {
            triangles = make_operands<false>(memory, slot, norms, false, lane, [](u32 units, int) { return units; });
        }
    }

    const float beta = (lane & 15) < length ? strength.of(raw_beta) : 0.0f;
    // The solve uses nothing on or above the diagonal, so nothing is masked.
    const float beta_early = __shfl_sync(kAllLanes, beta, g);
    const float beta_late = __shfl_sync(kAllLanes, beta, g + 8);
    float* lower = reinterpret_cast<float*>(memory + Slot::kLower);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        lower[lower_place(g, 2 * t + e)] = triangles.keys_low[e] * beta_early;
        lower[lower_place(g + 8, 2 * t + e)] = triangles.keys_low[2 + e] * beta_late;
        lower[lower_place(g + 8, 8 + 2 * t + e)] = triangles.keys_high[2 + e] * beta_late;
    }
    __syncwarp();
    float solve[16];
    unit_lower_inverse(solve, lower, lane);
    __syncwarp();
    if (lane < 16) {
        *reinterpret_cast<float*>(memory + Slot::kStrength + 4 * lane) = beta;
        if constexpr (kReversed) {
            // A lane's column is a row of the transposed matrix: two rows of 16 bytes of its blocks.
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* x = solve + 8 * half;
                *reinterpret_cast<uint4*>(memory + Slot::kSolve + BlockedSquare::at(lane, 8 * half)) =
                    make_uint4(pack_f16(x[0], x[1]), pack_f16(x[2], x[3]), pack_f16(x[4], x[5]),
                               pack_f16(x[6], x[7]));
            }
        } else {
#pragma unroll
            for (int row = 0; row < 16; ++row) {
                *reinterpret_cast<u16*>(memory + Slot::kSolve + BlockedSquare::at(row, lane)) =
                    cvt_f16_f32(solve[row]);
            }
        }
    }
    if constexpr (kQueries) {
        const bool first = 2 * t <= g, second = 2 * t + 1 <= g;
        // Blocks (0,0), (0,1), (1,0), (1,1) of P.
        const u32 blocks[4] = {
            pack_f16(first ? kRestored * triangles.queries_low[0] : 0.0f,
                     second ? kRestored * triangles.queries_low[1] : 0.0f),
            0,
            pack_f16(kRestored * triangles.queries_low[2], kRestored * triangles.queries_low[3]),
            pack_f16(first ? kRestored * triangles.queries_high[2] : 0.0f,
                     second ? kRestored * triangles.queries_high[3] : 0.0f)};
        if constexpr (kReversed) {
            const u32 transposed[4] = {blocks[0], blocks[2], blocks[1], blocks[3]};
            stmatrix_transposed(slot + Slot::kAttend + lane * 16, transposed);
        } else {
            u32* attend = reinterpret_cast<u32*>(memory + Slot::kAttend) + lane;
#pragma unroll
            for (int i = 0; i < 4; ++i) attend[32 * i] = blocks[i];
        }
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
    const Strength strength(in.beta_form);
    Gates gates(in.gate_form, 1.0f, in.lower_bound);
    while (!cursor.done(work)) {
        const int length = cursor.length();
        // Of an existing token in any case, to need no branch.
        const Element raw_beta = in.beta[(cursor.token() + min(lane & 15, length - 1)) * in.value_heads + cursor.head];
        if (cursor.head != head) {
            head = cursor.head;
            gates = Gates(in.gate_form, in.A_log != nullptr ? expf(in.A_log[head]) : 1.0f, in.lower_bound);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kSize / 32; ++i) {
                const i64 channel = static_cast<i64>(head) * kSize + 32 * i + lane;
                bias[32 * i + lane] = in.dt_bias != nullptr ? gates.rate * in.dt_bias[channel] : 0.0f;
            }
            __syncwarp();
        }

        unsigned char* slot_memory = memory + place.slot * Slot::kBytes;
        const u32 slot = shared + place.slot * Slot::kBytes;
        wait(loaded_barrier(shared, place.slot), place.parity);
        if (length < kChunk) {
            // A missing token decays nothing. Its k, q and beta are zero.
            const u32 fill = gates.missing();
            const int half = lane / 16 * Slot::kGateDistance;
            for (int row = length + lane % 16 / 8; row < kChunk; row += 2) {
                *reinterpret_cast<uint4*>(slot_memory + Slot::kGate + half + SwizzledTile::piece(row, lane % 8)) =
                    make_uint4(fill, fill, fill, fill);
            }
            __syncwarp();
        }
        const float2 key_norm = log2_norms(slot + Slot::kKey, lane);
        const float2 query_norm = kQueries ? log2_norms(slot + Slot::kQuery, lane) : make_float2(0.0f, 0.0f);
        Cursor ahead = cursor;
        RingPlace<kSlots> place_ahead = place;
        ahead.advance(work, kLoadAhead);
        place_ahead.advance(kLoadAhead);
        load(ahead, place_ahead);
        prepare_chunk(slot_memory, slot, bias, gates, raw_beta, strength, length, key_norm, query_norm, lane);
        fence_shared_for_wgmma();
        mbarrier_arrive(prepared_barrier(shared, place.slot));
        cursor.advance(work, kPrepareWarps);
        place.advance(kPrepareWarps);
    }
}
