// Conversions, and special functions of one instruction.
#pragma once

#include "common/types.cuh"

// Two float32 to two 16-bit elements in one register, to nearest even; `low` goes to the low half.

__device__ inline u32 pack_f16(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ inline u32 pack_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// Beyond the largest float16 that one; NaN stays NaN.
__device__ inline u32 pack_f16_saturated(float low, float high) {
    u32 y;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

// The larger, and the smaller, of two 16-bit elements, two at a time; of a NaN and a number the number.

__device__ inline u32 max_f16(u32 x, u32 y) {
    u32 z;
    asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ inline u32 min_f16(u32 x, u32 y) {
    u32 z;
    asm("min.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ inline u32 max_bf16(u32 x, u32 y) {
    u32 z;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

__device__ inline u32 min_bf16(u32 x, u32 y) {
    u32 z;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

// float16 bits to float32 and back (to nearest, ties to even).

__device__ inline float cvt_f32_f16(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

__device__ inline u16 cvt_f16_f32(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// Special functions of the multi-function unit, accurate to about 1e-7 relative (lg2: absolute near 1).

__device__ inline float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^x with subnormal results flushed: one instruction, where the form that keeps them takes four.
__device__ inline float ex2_flushed(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The smaller of two float32; NaN where either is (CUDA's own fminf drops it).

__device__ inline float min_nan(float x, float y) {
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
