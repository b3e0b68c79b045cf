// The gate and beta forms of gate.cuh in float64, for bounds.
#pragma once

#include "common/gate.cuh"

__device__ inline double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

__device__ inline double softplus(double x) { return fmax(x, 0.0) + log1p(exp(-fabs(x))); }

// Sort key of a channel: the log decay falls as it grows, so the channel with the smallest key decays least. Rounded down,
// which makes the log decay computed from it an upper bound.
__device__ inline float gate_argument(GateForm form, float g, float bias) {
    return form == GateForm::kLog ? -g : __fadd_rd(g, bias);
}

__device__ inline double log_decay_at(GateForm form, double argument, double rate, double lower_bound) {
    if (form == GateForm::kLog) return -argument;
    if (form == GateForm::kSoftplus) return -rate * softplus(argument);
    return lower_bound * sigmoid(rate * argument);
}

__device__ inline double activate_beta(BetaForm form, double beta) {
    if (form == BetaForm::kValue) return beta;
    const double s = sigmoid(beta);
    return form == BetaForm::kLogit ? s : 2.0 * s;
}
