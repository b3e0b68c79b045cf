// The products of one chunk with the forward chain's state, and the state's update (a warpgroup of the carrying warps).
//
//   U = N Diag(beta) (V - K+ S),  O = scale (Q+ S + P U),  S <- Diag(e^gamma_C) S + Kr^T U
#pragma once

#include "tile/fused/gate.cuh"
#include "tile/fused/state.cuh"

// Whether there are queries, and outputs are made.
constexpr bool kOutputs = kQueries;

// What a chunk adds to a column's norm at most, over the largest |beta v|.
constexpr float kGrowth = kChunk;

// Products of one chunk with the state: K+ S (columns 0 to 15, tokens) and Q+ S (columns 16 to 31), transposed.
constexpr int kProducts = kOutputs ? 16 : 8;

// Starts K+ S and Q+ S of a chunk for a warpgroup's 64 columns, and decays the state. In the accumulators the value
// columns are rows and the tokens columns, so every product's result is, packed, the A operand of the next.
// rounded: the state before its decay, as A fragments.
__device__ void start_products(State& state, float (&products)[kProducts], u32 (&rounded)[kSteps][4], u32 slot,
                               int lane) {
    state.round_and_decay(rounded, slot, lane);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const int keys = Slot::kKey + (step >> 2) * Slot::kKeyDistance + (step & 3) * 32;
        wgmma(products, rounded[step], rows_descriptor(slot, keys), step > 0);
    }
    wgmma_commit();
}

// Largest of its values, as a power of two, at which float16 still holds those a thousand times smaller.
constexpr int kSmallestKept = -4;

// U for the gradients: in a unit of its own, since beside a large state what a small beta writes would fade.
struct KeptUpdates {
    u32 packed[4];
    float unit;
};

// The rest of the chunk, from its values (two a register, as in the A fragment): the state's update, which is still
// under way on return, U if kKeeps and the outputs, two tokens a register.
template <bool kKeeps>
__device__ void update_state(State& state, float (&products)[kProducts], const u32 (&values)[4], u32 slot, float scale,
                             KeptUpdates& kept, u32 (&packed)[4], int lane) {
    // beta V before it meets the state: the unit follows what is written, not what beta keeps out, and float16 holds it.
    const Strengths strengths(slot, lane);
    float2 written[4];
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 v = Pair::unpack(values[i]), beta = strengths.of(i);
        written[i] = make_float2(beta.x * v.x, beta.y * v.y);
        most = fmaxf(most, fmaxf(fabsf(written[i].x), fabsf(written[i].y)));
    }
    const float value = largest_of_warp(most);
    wgmma_wait<0>();
    const float factor = state.keep_range(value, kGrowth);
    if (factor != 1.0f) {
#pragma unroll
        for (int i = 0; i < kProducts; ++i) products[i] *= factor;
    }

    float raise = 1.0f;
    if constexpr (kKeeps) {
        // Only what would lose bits: units that are alike for all columns of a tile spare the gradients' kernel work.
        const int exponent = exponent_of(fmaf(value, state.unit, strengths.largest() * state.bound));
        if (exponent < kSmallestKept) {
            raise = power_of_two(min(min(7 - exponent, 126), 120 - exponent_of(state.unit)));
        }
    }
    const float unit = raise * state.unit;
    u32 residual[4], updates[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 beta = strengths.of(i);
        residual[i] = pack_f16(fmaf(written[i].x, unit, -raise * beta.x * products[2 * i]),
                               fmaf(written[i].y, unit, -raise * beta.y * products[2 * i + 1]));
    }
    float update[8];
    wgmma_fence();
    wgmma(update, residual, square_descriptor(slot, Slot::kSolve), false);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 4; ++i) updates[i] = pack_f16(update[2 * i], update[2 * i + 1]);
    if constexpr (kKeeps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) kept.packed[i] = updates[i];
        kept.unit = unit;
        if (raise != 1.0f) {
            const float lower = reciprocal_of_power(raise);
#pragma unroll
            for (int i = 0; i < 4; ++i) updates[i] = pack_f16(lower * update[2 * i], lower * update[2 * i + 1]);
        }
    }

    float attended[8];
    wgmma_fence();
    if constexpr (kOutputs) {
        wgmma(attended, updates, square_descriptor(slot, Slot::kAttend), false);
        wgmma_commit();
    }
    wgmma_rows(state.value, updates, columns_descriptor<Slot::kGateDistance>(slot, Slot::kGate));
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
