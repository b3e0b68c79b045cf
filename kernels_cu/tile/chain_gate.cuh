// The gates as the chain kernels and their gradients sum them: in float16 on the tensor cores.
//
// KDA_BOUNDED 1: the `lower_bound` gate, in units of lower_bound / 1024. KDA_BOUNDED 0: `softplus` and `log`, in units of
// 1/512 of the base-2 logarithm; a token's decay is taken to be 2^-127 at least, which float32 cannot tell from less.
#pragma once

#include "common/gate.cuh"
#include "ptx/approximate.cuh"
#include "tile/half_pair.cuh"

using Pair = HalfPair<Element>;

constexpr bool kBounded = KDA_BOUNDED != 0;

// Below one, sums of slow channels would be of subnormal numbers; above, fast channels would leave float16.
constexpr float kGateScale = kBounded ? 1024.0f : 512.0f;
constexpr float kMostOfToken = 65000.0f;

// The gates of one head. g and dt_bias enter with the factor `rate`.
struct Gates {
    float rate;
    float gain = 0.0f;  // unbounded: units of a decay of 1, of base 2
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
            rate = is_log ? 1.0f : kLog2E;
            // Finite, for a missing token's decay of 0.
            gain = is_log ? -kLog2E * kGateScale : fminf(A * kGateScale, 1e30f);
            unit = -1.0f / kGateScale;
        }
    }

    // Raw g of a token that decays nothing, two of them.
    __device__ u32 missing() const { return is_log ? 0u : Pair::kMinusInfinity; }

    // Of one token; x: rate (g + dt_bias).
    __device__ float units(float x) const {
        if constexpr (kBounded) {
            constexpr float kUnit = 1.0f / kGateScale;
            return rcp(fmaf(ex2_flushed(x), kUnit, kUnit));
        }
        float decay = x;
        if (!is_log) {
            // log2(1 + 2^x), by its series where the sum would drop 2^x.
            const float small = ex2_flushed(-fabsf(x));
            decay = small < 1.0f / 1024.0f ? small * fmaf(small, -0.5f * kLog2E, kLog2E) : lg2(1.0f + small);
            decay += fmaxf(x, 0.0f);
        }
        const float sum = gain * decay;
        return sum > kMostOfToken ? kMostOfToken : sum;
    }

    // Of two tokens of one channel, as one register of a fragment; bias: rate dt_bias.
    __device__ u32 pair(u32 raw, float bias) const {
        const float2 g = Pair::unpack(raw);
        return pack_f16(units(fmaf(g.x, rate, bias)), units(fmaf(g.y, rate, bias)));
    }
};
