// Shared memory by its 32-bit address.
#pragma once

#include "common/types.cuh"

__device__ inline float4 load_shared_float4(u32 address) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

__device__ inline float2 load_shared_float2(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

__device__ inline uint4 load_shared_uint4(u32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

// Keeps the compiler from computing the address anew, a special register's read and more, wherever it is used.
__device__ inline u32 hold_address(u32 address) {
    asm volatile("mov.u32 %0, %0;" : "+r"(address));
    return address;
}
