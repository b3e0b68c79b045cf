// Keeps the compiler from remembering what it computed from a value before: to compute it again is cheaper than a
// register that holds it all the while.
#pragma once

__device__ inline void hold(float& x) { asm volatile("" : "+f"(x)); }
__device__ inline void hold(int& x) { asm volatile("" : "+r"(x)); }
