// What a thread has in registers: how many, for how long, and loads into them.
#pragma once

#include "common/types.cuh"

// Moves registers between the warpgroups of a block (sm_90a). Every warp of a warpgroup executes it.

template <int kRegisters>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Keeps the compiler from remembering what it computed from a value before: to compute it again is cheaper than a
// register that holds it all the while.

__device__ inline void hold(float& x) { asm volatile("" : "+f"(x)); }
__device__ inline void hold(int& x) { asm volatile("" : "+r"(x)); }

// Keeps the compiler from using one of these values before all of them are there, so that their latencies overlap. Other
// counts than 8 are left to the compiler.
template <int kCount>
__device__ inline void hold_together(float (&x)[kCount]) {
    if constexpr (kCount == 8) {
        asm volatile(""
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]));
    }
}

// Shared memory by its 32-bit address.

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
