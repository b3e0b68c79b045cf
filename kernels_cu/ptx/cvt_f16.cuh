// float16 bits to float32 and back (to nearest, ties to even).
#pragma once

#include "common/types.cuh"

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
