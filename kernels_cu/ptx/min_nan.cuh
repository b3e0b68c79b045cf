// The smaller of two float32; NaN where either is (CUDA's own fminf drops it).
#pragma once

__device__ inline float min_nan(float x, float y) {
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
