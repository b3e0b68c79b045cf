// Gate and beta forms: raw g and beta to log decay and write strength. A form's number is its place in GATES and BETAS of
// kda_engine/options.py.
#pragma once

#include "common/math.cuh"

enum class GateForm : int { kLowerBound = 0, kSoftplus = 1, kLog = 2 };
enum class BetaForm : int { kLogit = 0, kLogit2 = 1, kValue = 2 };

// The largest exponent whose power of e, and whose reciprocal, float32 holds as a normal number.
constexpr float kLargestExponent = 87.0f;

// exp(A_log) of a head. A rate that leaves float32, or comes near to it, is extreme: then functions of their own apply.
struct GateRate {
    float log, value;

    // A_log: 0 where absent. A comparison lets a NaN through.
    __device__ explicit GateRate(float A_log)
        : log(A_log), value(expf(A_log > kLargestExponent ? kLargestExponent : A_log)) {}

    // Up to here e^x underflows before exp(A_log) e^x is worth anything.
    __device__ bool extreme() const { return log > 60.0f; }

    // x exp(A_log), of an extreme one too.
    __device__ float times(float x) const { return x * value * expf(fmaxf(log - kLargestExponent, 0.0f)); }

    // x exp(A_log) e^exponent, where e^exponent alone would be no normal number.
    __device__ float times_small(float x, float exponent) const { return x * expf(log + exponent); }
};

// As `log_decay`, with an extreme rate.
static __device__ __noinline__ float log_decay_of_extreme(GateForm form, float x, GateRate rate, float lower_bound) {
    if (form == GateForm::kLowerBound) return lower_bound * sigmoid(rate.times(x));
    // Far to the left softplus(x) is e^x.
    return x < -kLargestExponent ? rate.times_small(-1.0f, x) : rate.times(-softplus(x));
}

// Natural log decay of one channel, at most 0; -inf is legal. bias: dt_bias, 0 where absent.
__device__ inline float log_decay(GateForm form, float g, const GateRate& rate, float bias, float lower_bound) {
    if (form == GateForm::kLog) return g;
    if (rate.extreme()) return log_decay_of_extreme(form, g + bias, rate, lower_bound);
    if (form == GateForm::kSoftplus) return -rate.value * softplus(g + bias);
    return lower_bound * sigmoid(rate.value * (g + bias));
}

__device__ inline float activate_beta(BetaForm form, float beta) {
    if (form == BetaForm::kValue) return beta;
    const float s = sigmoid(beta);
    return form == BetaForm::kLogit ? s : 2.0f * s;
}
