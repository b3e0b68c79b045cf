// The state that a chain kernel's carrying warps hold, transposed: value columns are rows of the accumulators. In the
// backward it is the state's gradient.
//
// Operands are float16; every warp's 16 columns carry a unit, a power of two, that keeps them in its range.
#pragma once

#include "common/power.cuh"
#include "common/warp.cuh"
#include "tile/fused/ring.cuh"

// Where the states of the launch lie; initial_state may be null for zeros.
struct States {
    const float* initial_state;
    float* final_state;
    float* carried;
    float* transitions;
};

// Largest value and state (a bound on a column's norm) in the units of the float16 operands. They keep U, at most
// beta (|v| + |S^T k|) with beta <= 2, and beta X, at most beta (16 |dO| + |dS^T k|), below 65504.
constexpr float kLargestValue = 256.0f;
constexpr float kLargestBound = 16384.0f;
// Below this a column's operands would lose bits to subnormals.
constexpr float kSmallestBound = 1.0f / 64.0f;
constexpr float kMiddleBound = 512.0f;
constexpr float kRootSize = 11.3137085f;  // sqrt(kSize), rounded up
// The state's size is measured every 16 chunks: if it halves in each, it shrinks by 2^16 meanwhile, which float16 still
// represents.
constexpr int kMeasureEvery = 16;
// Chunks between looks at a few of its values: a chunk may reset it, and what it writes then may be small.
constexpr int kGlanceEvery = 2;
constexpr float kSmallValue = 1.0f / 1024.0f;

__device__ float largest_of_warp(float x) {
    return __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(x)));
}

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
    __device__ static const float* source(const Cursor& cursor, const States& states, int value_heads) {
        const int from = cursor.piece.state_in;
        if (from == kNowhere) return nullptr;
        const float* buffer = from >= 0 ? states.carried : states.initial_state;
        if (buffer == nullptr) return nullptr;
        return buffer + (static_cast<i64>(from >= 0 ? from : -1 - from) * value_heads + cursor.head) * kStateSize;
    }

    __device__ void begin(const Cursor& cursor, const States& states, int value_heads, int first_column, int lane) {
        const float* from = source(cursor, states, value_heads);
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

    // Before a chunk, from whose number on, up or down, all later ones follow.
    __device__ void look(int chunk) {
        if (chunk % kMeasureEvery == 0 || (chunk % kGlanceEvery == 0 && seems_small())) measure();
    }

    __device__ bool seems_small() const {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < kSize / 2; i += 9) most = fmaxf(most, fabsf(value[i]));
        return largest_of_warp(most) < kSmallValue;
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
        const float factor = power_of_two(wanted - now);
#pragma unroll
        for (int i = 0; i < kSize / 2; ++i) value[i] *= factor;
        unit *= factor;
        bound *= factor;
        return factor;
    }

    // Makes room for a chunk whose values are at most `value` and add at most growth * value to a column's norm.
    // Changes the unit where they or the state have left the range of the operands; returns the factor.
    __device__ float keep_range(float value, float growth) {
        const float grown = fmaf(growth * value, unit, bound);
        if (value * unit <= kLargestValue && grown <= kLargestBound && (grown >= kSmallestBound || grown == 0.0f)) {
            bound = grown;
            return 1.0f;
        }
        // Products taken before a decay are not bounded by what is left of the state: never scale up by that.
        bound = grown < kSmallestBound ? grown
                                       : fmaxf(fmaf(growth * value, unit, kRootSize * largest()), kMiddleBound);
        return center();
    }

    // Rounds to A fragments, then decays by the slot's e^gamma_C: before any product starts, since the tensor cores own
    // their registers while they run.
    __device__ void round_and_decay(u32 (&rounded)[kSteps][4], u32 slot, int lane) {
        const u32 decays = slot + Slot::kDecay + 4 * (lane & 3) * kDecayStride;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            float* x = value + 8 * step;
            const float4 decay = load_shared_float4(decays + 16 * step);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                rounded[step][i] = pack_f16(x[2 * i], x[2 * i + 1]);
                x[2 * i] *= i < 2 ? decay.x : decay.z;
                x[2 * i + 1] *= i < 2 ? decay.y : decay.w;
            }
        }
    }

    __device__ void end(const Cursor& cursor, const States& states, int value_heads, int first_column, int lane) {
        const int to = cursor.piece.state_out;
        if (to == kNowhere) return;
        float* buffer = to < 0 ? states.final_state
                               : cursor.piece.carried == Carried::kTransition ? states.transitions : states.carried;
        float* target = buffer + (static_cast<i64>(to < 0 ? -1 - to : to) * value_heads + cursor.head) * kStateSize;
        const float restore = reciprocal_of_power(unit);
        visit(first_column, lane, [&](int k, int v, float& x) { target[k * kSize + v] = restore * x; });
    }
};

// beta of the tokens of a lane's accumulators: columns 2t, 2t + 1, 2t + 8, 2t + 9.
struct Strengths {
    float2 early, late;

    __device__ Strengths(u32 slot, int lane)
        : early(load_shared_float2(slot + Slot::kStrength + 8 * (lane & 3))),
          late(load_shared_float2(slot + Slot::kStrength + 32 + 8 * (lane & 3))) {}

    __device__ float largest() const {
        return largest_of_warp(fmaxf(fmaxf(early.x, early.y), fmaxf(late.x, late.y)));
    }

    // Of register i of an A fragment.
    __device__ float2 of(int i) const { return i < 2 ? early : late; }
};

// The largest magnitude among a warp's values, two a register.
__device__ float largest_value(const u32 (&values)[4]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) most = __vmaxu2(most, values[i] & 0x7fff7fffu);
    most = __reduce_max_sync(kAllLanes, max(most & 0xffffu, most >> 16));
    return Pair::unpack(most).x;
}
