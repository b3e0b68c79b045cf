// Products of float32 fragments on the tensor cores through TF32.
//
// One pass rounds each operand to 10 mantissa bits (what 16-bit inputs are worth). Three passes split each operand
// into a rounded part and the rounded rest and leave out only rest x rest: float32 accuracy.
//
// The k index of a fragment is free as long as A and B agree. Here k slot t stands for position 2t of its group of
// eight and slot t + 4 for position 2t + 1. An accumulator then is an A fragment as it stands (`as_rows`), and a
// lane's two B values are neighbours.
#pragma once

#include "ptx/mma.cuh"

template <int kPasses>
struct RowFragment {
    u32 high[4];
    u32 low[4];
};

// Half a unit of TF32's last place, added to the bits: the tensor cores read no further than that place, so this rounds
// to nearest. (cvt.rna.tf32 does the same at a quarter of the rate.) A NaN becomes zero: for where it shows elsewhere.
__device__ inline u32 round_tf32(float x) { return __float_as_uint(x) + 0x1000u; }

// The same, but a NaN stays one: half a unit added as a number, away from zero.
__device__ inline u32 round_tf32_or_nan(float x) {
    const float power = __uint_as_float(__float_as_uint(x) & 0xff800000u);
    return __float_as_uint(fmaf(power, 0x1p-11f, x));
}

// Both as a float32 that is exactly what the tensor cores will read.
__device__ inline float rounded_tf32(float x) { return __uint_as_float(round_tf32(x) & 0xffffe000u); }
__device__ inline float rounded_tf32_or_nan(float x) { return __uint_as_float(round_tf32_or_nan(x) & 0xffffe000u); }

// The tensor cores cut the rest off, which leaves 2^-21 of x at most.
__device__ inline void split_tf32(float x, u32& high, u32& low) {
    const float rounded = rounded_tf32_or_nan(x);
    high = __float_as_uint(rounded);
    low = __float_as_uint(x - rounded);
}

// A fragment from (row g, position 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1): the order of an accumulator.
template <int kPasses>
__device__ inline RowFragment<kPasses> as_rows(float x0, float x1, float x2, float x3) {
    RowFragment<kPasses> a;
    const float ordered[4] = {x0, x2, x1, x3};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (kPasses == 3) {
            split_tf32(ordered[i], a.high[i], a.low[i]);
        } else {
            a.high[i] = round_tf32_or_nan(ordered[i]);
        }
    }
    return a;
}

// d += A B with B's column g at positions 2t (b0) and 2t + 1 (b1). With one pass, B must be rounded already.
template <int kPasses>
__device__ inline void multiply_add(float (&d)[4], const RowFragment<kPasses>& a, float b0, float b1) {
    static_assert(kPasses == 1 || kPasses == 3);
    if constexpr (kPasses == 3) {
        u32 high[2], low[2];
        split_tf32(b0, high[0], low[0]);
        split_tf32(b1, high[1], low[1]);
        mma_tf32(d, a.low, high);
        mma_tf32(d, a.high, low);
        mma_tf32(d, a.high, high);
    } else {
        const u32 high[2] = {__float_as_uint(b0), __float_as_uint(b1)};
        mma_tf32(d, a.high, high);
    }
}
