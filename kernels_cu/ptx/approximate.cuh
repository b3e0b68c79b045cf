// Special functions of the multi-function unit, accurate to about 1e-7 relative (lg2: absolute near 1).
#pragma once

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
