// Derivatives of the gate and beta forms of gate.cuh.
#pragma once

#include "common/gate.cuh"

// sigmoid(x) * sigmoid(-x), accurate to rounding at both ends.
__device__ inline float sigmoid_slope(float x) {
    const float small = expf(-fabsf(x));
    return __fdividef(small, (1.0f + small) * (1.0f + small));
}

struct GateGradient {
    float raw;   // of raw g, and of dt_bias
    float rate;  // this token's and channel's part of the gradient of A_log
};

// As `gate_adjoint`, with an extreme rate; x: g + dt_bias.
static __device__ __noinline__ GateGradient gate_adjoint_of_extreme(GateForm form, float d, float x, GateRate rate,
                                                                    float lower_bound) {
    if (form == GateForm::kSoftplus) {
        const float of_rate = d == 0.0f ? 0.0f : d * log_decay_of_extreme(form, x, rate, lower_bound);
        return {x < -kLargestExponent ? rate.times_small(-d, x) : rate.times(-sigmoid(x) * d), of_rate};
    }
    x = rate.times(x);
    const float bounded = d * lower_bound, dx = bounded * sigmoid_slope(x);
    // Far out on either side the sigmoid's slope is e^-|x|.
    const float raw = fabsf(x) > kLargestExponent ? rate.times_small(bounded, -fabsf(x)) : rate.times(dx);
    return {raw, dx == 0.0f ? 0.0f : dx * x};
}

// d: gradient of the log decay. Where a channel was reset or masked the rate's factor is infinite and the gradient 0:
// 0 * inf is not to be summed.
__device__ inline GateGradient gate_adjoint(GateForm form, float d, float g, const GateRate& rate, float bias,
                                            float lower_bound) {
    if (form == GateForm::kLog) return {d, 0.0f};
    if (rate.extreme()) return gate_adjoint_of_extreme(form, d, g + bias, rate, lower_bound);
    if (form == GateForm::kSoftplus) {
        const float of_rate = d == 0.0f ? 0.0f : d * log_decay(form, g, rate, bias, lower_bound);
        return {-rate.value * sigmoid(g + bias) * d, of_rate};
    }
    const float x = rate.value * (g + bias);
    const float dx = d * lower_bound * sigmoid_slope(x);
    return {rate.value * dx, dx == 0.0f ? 0.0f : dx * x};
}

// Gradient of raw beta. along: the gradient of the activated beta times that beta, which is how it comes out of what the
// token writes; strength: the activated beta.
__device__ inline float beta_adjoint(BetaForm form, float along, float strength, float raw) {
    // A strength of 0 is the sigmoid's underflow, where its slope is 0 too.
    const float d = strength == 0.0f ? 0.0f : along / strength;
    if (form == BetaForm::kValue) return d;
    const float slope = sigmoid_slope(raw);
    return d * (form == BetaForm::kLogit ? slope : 2.0f * slope);
}
