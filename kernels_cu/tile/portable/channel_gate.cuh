// The gate of one channel of backward_tokens.cu, and what it gives back.
#pragma once

#include "common/gate_adjoint.cuh"
#include "tile/portable/token_block.cuh"
#include "tile/shared/element.cuh"

// The gate of one channel over the chunk's tokens, whose gradients go `stride` apart. The form is a constant, so that the
// unrolled loops hold the code of one form each, and only that passes through the instruction cache.
struct ChannelGate {
    GateRate rate;
    float bias, lower_bound;
    int tokens;
    i64 stride;

    // Log decays in bits; 0 past the end.
    template <GateForm kForm>
    __device__ void activate(const float (&raw)[kChunk], float (&decay)[kChunk]) const {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            decay[i] = i < tokens ? log_decay(kForm, raw[i], rate, bias, lower_bound) * kLog2E : 0.0f;
        }
    }

    // Writes dg from the gradients of the log decays; returns the sums over the tokens. raw: in shared memory.
    template <GateForm kForm>
    __device__ GateGradient adjoint(const float (&d)[kChunk], const volatile float* raw, Element* dg) const {
        GateGradient sums{0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            if (i < tokens) {
                const GateGradient one = gate_adjoint(kForm, d[i], raw[i * kStride], rate, bias, lower_bound);
                Element result;
                from_float(result, one.raw);
                *dg = result;
                dg += stride;
                sums.raw += one.raw;
                sums.rate += one.rate;
            }
        }
        return sums;
    }

    // By the form, which is a constant inside.

    __device__ void activate(GateForm form, const float (&raw)[kChunk], float (&decay)[kChunk]) const {
        if (form == GateForm::kLowerBound) {
            activate<GateForm::kLowerBound>(raw, decay);
        } else if (form == GateForm::kSoftplus) {
            activate<GateForm::kSoftplus>(raw, decay);
        } else {
            activate<GateForm::kLog>(raw, decay);
        }
    }

    __device__ GateGradient adjoint(GateForm form, const float (&d)[kChunk], const volatile float* raw,
                                    Element* dg) const {
        if (form == GateForm::kLowerBound) return adjoint<GateForm::kLowerBound>(d, raw, dg);
        if (form == GateForm::kSoftplus) return adjoint<GateForm::kSoftplus>(d, raw, dg);
        return adjoint<GateForm::kLog>(d, raw, dg);
    }
};
