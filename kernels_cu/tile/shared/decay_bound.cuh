// The bound on what one token's map leaves of a state, for all who certify or report by it.
//
//   m = max_d l_d + log max(1, |1 - beta ||k||^2|): the map has norm at most e^m        (l: log decay)
//
// The second term is 0 for normalised k and 0 <= beta <= 2. Every step is rounded so that the bound only grows: the least
// gate argument in float32 downwards, all that follows in float64, each term raised by more than what sums of a few
// thousand of them lose. NaN stays NaN, and a comparison with it certifies nothing.
#pragma once

#include "common/gate_wide.cuh"
#include "ptx/convert.cuh"

constexpr double kAbove = 1.0 / (1ll << 40);

// Above x by more than its rounding errors; -inf and NaN stay what they are.
__device__ inline double raised(double x) { return x * (x < 0.0 ? 1.0 - kAbove : 1.0 + kAbove); }

// The least gate argument of a token's channels, one by one.
struct LeastArgument {
    GateForm form;

    __device__ static float none() { return infinity(); }
    __device__ static float combine(float x, float y) { return min_nan(x, y); }
    __device__ float fold(float least, float g, float bias) const { return min_nan(least, gate_argument(form, g, bias)); }
};

// max_d l_d. rate: exp(A_log), 1 where absent.
__device__ inline double slowest_log_decay(GateForm form, float least, double rate, double lower_bound) {
    return raised(log_decay_at(form, least, rate, lower_bound));
}

// log max(1, |1 - beta ||k||^2|).
__device__ inline double log_growth(double strength, double key_square) {
    const double growth = raised(fabs(1.0 - strength * key_square));
    // NaN is not at most 1.
    return growth <= 1.0 ? 0.0 : log(growth);
}
