// Gate and beta forms: raw g and beta to log decay and write strength. A form's number is its place in GATES and BETAS of
// kda_engine/options.py.
#pragma once

#include "common/math.cuh"

enum class GateForm : int { kLowerBound = 0, kSoftplus = 1, kLog = 2 };
enum class BetaForm : int { kLogit = 0, kLogit2 = 1, kValue = 2 };

// Natural log decay of one channel, at most 0; -inf is legal. rate is exp(A_log), bias dt_bias (1 and 0 where absent).
__device__ inline float log_decay(GateForm form, float g, float rate, float bias, float lower_bound) {
    if (form == GateForm::kLog) return g;
    if (form == GateForm::kSoftplus) return -rate * softplus(g + bias);
    return lower_bound * sigmoid(rate * (g + bias));
}

__device__ inline float activate_beta(BetaForm form, float beta) {
    if (form == BetaForm::kValue) return beta;
    const float s = sigmoid(beta);
    return form == BetaForm::kLogit ? s : 2.0f * s;
}
