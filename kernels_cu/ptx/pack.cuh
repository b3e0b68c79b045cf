// Two float32 to two 16-bit elements in one register, to nearest even; `low` goes to the low half.
#pragma once

#include "common/types.cuh"

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
