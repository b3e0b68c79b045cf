// The element type of the per-token operands and of the output (KDA_ELEMENT names one of the structs below).
// Arithmetic is always float32; elements exist only in global memory.
#pragma once

#include "common/types.cuh"
#include "ptx/convert.cuh"

struct Float32 { float bits; };
struct BFloat16 { u16 bits; };
struct Float16 { u16 bits; };

using Element = KDA_ELEMENT;

__device__ inline float to_float(Float32 x) { return x.bits; }
__device__ inline float to_float(BFloat16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
__device__ inline float to_float(Float16 x) { return cvt_f32_f16(x.bits); }

__device__ inline void from_float(Float32& y, float x) { y.bits = x; }
__device__ inline void from_float(Float16& y, float x) { y.bits = cvt_f16_f32(x); }
// To nearest, ties to even; NaN stays NaN.
__device__ inline void from_float(BFloat16& y, float x) {
    const u32 bits = __float_as_uint(x);
    const u32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    y.bits = static_cast<u16>(x != x ? 0x7fffu : rounded >> 16);
}

// Two neighbours in memory; `aligned` promises that the first is at an even element.
struct alignas(2 * sizeof(Element)) ElementPair { Element x, y; };

__device__ inline float2 load_pair(const Element* from, bool aligned) {
    if (aligned) {
        const ElementPair pair = *reinterpret_cast<const ElementPair*>(from);
        return make_float2(to_float(pair.x), to_float(pair.y));
    }
    return make_float2(to_float(from[0]), to_float(from[1]));
}

__device__ inline void store_pair(Element* to, float2 values, bool aligned) {
    ElementPair pair;
    from_float(pair.x, values.x);
    from_float(pair.y, values.y);
    if (aligned) {
        *reinterpret_cast<ElementPair*>(to) = pair;
    } else {
        to[0] = pair.x;
        to[1] = pair.y;
    }
}
