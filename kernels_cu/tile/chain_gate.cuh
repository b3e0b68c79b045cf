// The `lower_bound` gate as the chain kernels and their gradients sum it: in float16 on the tensor cores.
#pragma once

#include "ptx/approximate.cuh"
#include "tile/half_pair.cuh"

using Pair = HalfPair<Element>;

// Gates are summed as 1024 sigma in float16: below one they would be subnormal for slow channels.
constexpr float kGateScale = 1024.0f;

// 1024 sigma of two tokens of one channel, as one register of a B fragment.
__device__ u32 scaled_sigmoids(u32 raw, float rate, float bias) {
    const float2 g = Pair::unpack(raw);
    constexpr float kUnit = 1.0f / kGateScale;
    const float x = rcp(fmaf(ex2_flushed(fmaf(g.x, rate, bias)), kUnit, kUnit));
    const float y = rcp(fmaf(ex2_flushed(fmaf(g.y, rate, bias)), kUnit, kUnit));
    return pack_f16(x, y);
}
