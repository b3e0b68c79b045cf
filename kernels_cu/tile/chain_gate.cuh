// The gates as the chain kernels and their gradients sum them: in float16 on the tensor cores.
//
// KDA_BOUNDED 1: the `lower_bound` gate, in units of lower_bound / 1024. KDA_BOUNDED 0: `softplus` and `log`, in units of
// 1/512 of the base-2 logarithm. The largest float16, 65504 units, stands for every stronger decay of a token: 2^-127.9,
// which the kernels flush to zero anyway.
#pragma once

#include "common/gate.cuh"
#include "ptx/approximate.cuh"
#include "tile/half_pair.cuh"

using Pair = HalfPair<Element>;

constexpr bool kBounded = KDA_BOUNDED != 0;

// Below one, sums of slow channels would be of subnormal numbers; above, fast channels would leave float16.
constexpr float kGateScale = kBounded ? 1024.0f : 512.0f;

// log2(1 + s) / s for s in [0, 1], the lowest power first: the least largest relative error at this degree, 5.7e-5.
constexpr float kSoftplus[5] = {1.44261321f, -0.71698741f, 0.44189881f, -0.22711942f, 0.05965153f};

// The gates of one head. g and dt_bias enter with the factor `rate`.
struct Gates {
    float rate;
    float gain = 0.0f;  // softplus: units of a decay of 1, of base 2
    float unit;  // log2 decay of one unit
    bool is_log;

    // A: exp(A_log), 1 where absent.
    __device__ Gates(GateForm form, float A, float lower_bound) {
        is_log = !kBounded && form == GateForm::kLog;
        if (kBounded) {
            // Not zero, so that the -inf of a missing token stays one.
            rate = -kLog2E * fmaxf(A, 1e-30f);
            unit = lower_bound * kLog2E / kGateScale;
        } else {
            rate = is_log ? -kLog2E * kGateScale : kLog2E;
            // Finite, for a missing token's decay of 0.
            gain = fminf(A * kGateScale, 1e30f);
            unit = -1.0f / kGateScale;
        }
    }

    // Raw g of a token that decays nothing, two of them.
    __device__ u32 missing() const { return is_log ? 0u : Pair::kMinusInfinity; }

    // Of one token; x: rate (g + dt_bias).
    template <bool kIsLog>
    __device__ float units(float x) const {
        if constexpr (kBounded) {
            constexpr float kUnit = 1.0f / kGateScale;
            return rcp(fmaf(ex2_flushed(x), kUnit, kUnit));
        }
        if constexpr (kIsLog) return x;
        // log2(1 + 2^x) = max(x, 0) + log2(1 + 2^-|x|).
        const float small = ex2_flushed(-fabsf(x));
        float series = kSoftplus[4];
#pragma unroll
        for (int i = 3; i >= 0; --i) series = fmaf(series, small, kSoftplus[i]);
        return gain * fmaf(small, series, fmaxf(x, 0.0f));
    }

    // Of two tokens of one channel, as one register of a fragment; bias: rate dt_bias. kIsLog: as is_log.
    template <bool kIsLog>
    __device__ u32 pair(u32 raw, float bias) const {
        const float2 g = Pair::unpack(raw);
        const float early = units<kIsLog>(fmaf(g.x, rate, bias)), late = units<kIsLog>(fmaf(g.y, rate, bias));
        return kBounded ? pack_f16(early, late) : pack_f16_saturated(early, late);
    }

    __device__ u32 pair(u32 raw, float bias) const { return is_log ? pair<true>(raw, bias) : pair<false>(raw, bias); }
};
