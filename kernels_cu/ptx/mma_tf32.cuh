// D += A B for one warp: A 16 x 8, B 8 x 8, D 16 x 8, TF32 operands, float32 accumulation (m16n8k8).
//
// With g = lane / 4 and t = lane % 4 a lane holds
//   A: a0 (g, t), a1 (g + 8, t), a2 (g, t + 4), a3 (g + 8, t + 4)      (row, k)
//   B: b0 (t, g), b1 (t + 4, g)                                        (k, column)
//   D: d0 (g, 2t), d1 (g, 2t + 1), d2 (g + 8, 2t), d3 (g + 8, 2t + 1)  (row, column)
#pragma once

#include "common/types.cuh"

__device__ inline void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
