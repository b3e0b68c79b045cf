// The gates as the chain kernels and their gradients sum them: in float16 on the tensor cores.
//
// KDA_BOUNDED 1: the `lower_bound` gate, in units of lower_bound / 1024. KDA_BOUNDED 0: `softplus` and `log`, in units of
// 1/512 of the base-2 logarithm. The largest float16, 65504 units, stands for every stronger decay of a token: 2^-127.9,
// which the kernels flush to zero anyway.
#pragma once

#include "common/gate.cuh"
#include "common/gate_adjoint.cuh"
#include "ptx/convert.cuh"
#include "ptx/registers.cuh"
#include "tile/shared/half_pair.cuh"

using Pair = HalfPair<Element>;

constexpr bool kBounded = KDA_BOUNDED != 0;

// Units of a log2 decay of 1 (of lower_bound, where bounded). With a smaller scale slow channels would become subnormal in
// float16, with a larger one fast channels would overflow it.
constexpr float kGateScale = kBounded ? 1024.0f : 512.0f;

// log2(1 + s) / s for s in [0, 1], the lowest power first: the least largest relative error at this degree, 5.7e-5.
constexpr float kSoftplus[5] = {1.44261321f, -0.71698741f, 0.44189881f, -0.22711942f, 0.05965153f};

// beta as the chains activate it: by the special function unit, good to 2e-7. Of forms within [0, 2] only, at which one
// token's map does not lengthen a state (normalised keys).
struct Strength {
    float most;

    __device__ explicit Strength(BetaForm form) : most(form == BetaForm::kLogit2 ? 2.0f : 1.0f) {}

    __device__ float of(Element raw) const { return most * rcp(1.0f + ex2_flushed(-kLog2E * to_float(raw))); }

    // Gradient of raw beta. along: the gradient of beta times beta; the slope of a sigmoid is a share sigmoid(-raw) of it.
    __device__ float adjoint(float along, Element raw) const {
        return along * rcp(1.0f + ex2_flushed(kLog2E * to_float(raw)));
    }
};

// The gates of one head. g and dt_bias enter with the factor `rate`.
struct Gates {
    float rate;
    float gain = 0.0f;  // softplus: units of a decay of 1, of base 2
    float unit;  // log2 decay of one unit
    bool is_log;

    // A: exp(A_log), 1 where absent.
    __device__ Gates(GateForm form, float A, float lower_bound) {
        is_log = !kBounded && form == GateForm::kLog;
        // Finite, for gates of 0 and for a missing token's decay of 0. A comparison lets a NaN through.
        if (A > 1e27f) A = 1e27f;
        if (kBounded) {
            // Not zero, so that the -inf of a missing token stays one.
            rate = -kLog2E * (A < 1e-30f ? 1e-30f : A);
            unit = lower_bound * kLog2E / kGateScale;
        } else {
            rate = is_log ? -kLog2E * kGateScale : kLog2E;
            gain = A * kGateScale;
            unit = -1.0f / kGateScale;
        }
    }

    // Raw g of a token that decays nothing, two of them.
    __device__ u32 missing() const { return is_log ? 0u : Pair::kMinusInfinity; }

    // log2(1 + 2^x) = max(x, 0) + log2(1 + 2^-|x|) from small = 2^-|x|.
    __device__ static float softplus(float x, float small) {
        float series = kSoftplus[4];
#pragma unroll
        for (int power = 3; power >= 0; --power) series = fmaf(series, small, kSoftplus[power]);
        return fmaf(small, series, fmaxf(x, 0.0f));
    }

    // Of kCount tokens, in place; x: rate (g + dt_bias). Stage by stage, so that the tokens' latencies overlap.
    template <bool kIsLog, int kCount>
    __device__ void to_units(float (&x)[kCount]) const {
        if constexpr (kBounded) {
            constexpr float kUnit = 1.0f / kGateScale;
#pragma unroll
            for (int i = 0; i < kCount; ++i) x[i] = rcp(fmaf(ex2_flushed(x[i]), kUnit, kUnit));
        } else if constexpr (!kIsLog) {
            // `softplus`, whose series goes token beside token here.
            float small[kCount], series[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) small[i] = ex2_flushed(-fabsf(x[i]));
            hold_together(small);
#pragma unroll
            for (int i = 0; i < kCount; ++i) series[i] = kSoftplus[4];
#pragma unroll
            for (int power = 3; power >= 0; --power) {
#pragma unroll
                for (int i = 0; i < kCount; ++i) series[i] = fmaf(series[i], small[i], kSoftplus[power]);
                hold_together(series);
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i) x[i] = gain * fmaf(small[i], series[i], fmaxf(x[i], 0.0f));
        }
    }

    // Of kCount registers of a fragment, in place: two tokens of one channel each; bias: rate dt_bias, by register.
    // kIsLog: as is_log.
    template <bool kIsLog, int kCount>
    __device__ void activate(u32 (&raw)[kCount], const float (&bias)[kCount]) const {
        float x[2 * kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float2 g = Pair::unpack(raw[i]);
            x[2 * i] = fmaf(g.x, rate, bias[i]);
            x[2 * i + 1] = fmaf(g.y, rate, bias[i]);
        }
        to_units<kIsLog>(x);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            raw[i] = kBounded ? pack_f16(x[2 * i], x[2 * i + 1]) : pack_f16_saturated(x[2 * i], x[2 * i + 1]);
        }
    }

    // Whether one of the tokens of a fragment, of channels g and g + 8, decays by more than `most` units: from the raw
    // gates, since units grow with them (`log`: fall). Sharp to a float32's rounding.
    __device__ bool decays_beyond(const u32 (&raw)[2][4], const float (&bias)[2], float most) const {
        // The argument at which the units are `most`.
        const float limit = is_log ? most : lg2(ex2_flushed(most * rcp(gain)) - 1.0f);
        bool beyond = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 x = raw[0][2 * half];
#pragma unroll
            for (int i = 1; i < 4; ++i) {
                const u32 y = raw[i / 2][i % 2 + 2 * half];
                x = is_log ? Pair::smaller(x, y) : Pair::larger(x, y);
            }
            const float2 g = Pair::unpack(x);
            beyond |= fmaf(is_log ? fminf(g.x, g.y) : fmaxf(g.x, g.y), rate, bias[half]) > limit;
        }
        return beyond;
    }

    // Of one register.
    __device__ u32 pair(u32 raw, float bias) const {
        u32 units[1] = {raw};
        const float biases[1] = {bias};
        if (is_log) {
            activate<true>(units, biases);
        } else {
            activate<false>(units, biases);
        }
        return units[0];
    }
};

// From the gradients of the log decays of one head to those of raw g and of A_log.
struct GateAdjoint {
    // Of raw g, of A_log: what does not depend on the token.
    float of_raw, of_rate;

    __device__ GateAdjoint(const Gates& gates, float lower_bound) {
        constexpr float kLn2 = 1.0f / kLog2E;
        if (kBounded) {
            of_rate = -kLn2 * lower_bound;
            of_raw = of_rate * gates.rate;
        } else {
            of_raw = -1.0f / kGateScale * gates.gain;
            of_rate = kLn2 * of_raw;
        }
    }

    // d: the gradient of the log decay; x: `rate` (g + dt_bias) of Gates. Not for `log`, whose g is the log decay. Where a
    // channel was reset x is infinite and d is 0: 0 * inf is not to be summed.
    __device__ GateGradient take(float d, float x) const {
        const float small = ex2_flushed(-fabsf(x)), share = rcp(1.0f + small);
        if constexpr (kBounded) {
            const float dx = d * (small * share * share);
            return {of_raw * dx, dx == 0.0f ? 0.0f : of_rate * dx * x};
        } else {
            const float decay = Gates::softplus(x, small);
            return {of_raw * d * (x < 0.0f ? small * share : share), d == 0.0f ? 0.0f : of_rate * d * decay};
        }
    }
};
