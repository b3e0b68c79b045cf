// Two neighbouring 16-bit elements in one register: conversions, order, the matching product, -inf.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "tile/shared/element.cuh"

template <typename E>
struct HalfPair;

template <>
struct HalfPair<BFloat16> {
    static constexpr u32 kMinusInfinity = 0xff80ff80u;
    __device__ static float2 unpack(u32 x) {
        return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
    }
    __device__ static u32 pack(float low, float high) { return pack_bf16(low, high); }
    __device__ static u32 larger(u32 x, u32 y) { return max_bf16(x, y); }
    __device__ static u32 smaller(u32 x, u32 y) { return min_bf16(x, y); }
    __device__ static void multiply_half(float (&d)[4], u32 a0, u32 a1, u32 b0) { mma_half_bf16(d, a0, a1, b0); }
};

template <>
struct HalfPair<Float16> {
    static constexpr u32 kMinusInfinity = 0xfc00fc00u;
    __device__ static float2 unpack(u32 x) {
        return make_float2(cvt_f32_f16(static_cast<u16>(x)), cvt_f32_f16(static_cast<u16>(x >> 16)));
    }
    __device__ static u32 pack(float low, float high) { return pack_f16(low, high); }
    __device__ static u32 larger(u32 x, u32 y) { return max_f16(x, y); }
    __device__ static u32 smaller(u32 x, u32 y) { return min_f16(x, y); }
    __device__ static void multiply_half(float (&d)[4], u32 a0, u32 a1, u32 b0) { mma_half_f16(d, a0, a1, b0); }
};
