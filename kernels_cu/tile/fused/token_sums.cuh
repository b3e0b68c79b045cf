// Running sums over the tokens of a tile, within blocks of `size` of them (a power of two), by channel.
#pragma once

#include "common/warp.cuh"
#include "tile/fused/gradient_pairs.cuh"

// x_t <- sum of x_i over the block's i >= t.
__device__ inline void sum_from_token(ChannelTokens& x, int size, int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float behind = 0.0f;
#pragma unroll
        for (int n = 3; n >= 0; --n) {
            if (8 * (n + 1) % size == 0) behind = 0.0f;
            float& first = x[n][2 * half];
            float& second = x[n][2 * half + 1];
            const float own = first + second;
            const float next = __shfl_xor_sync(kAllLanes, own, 1);
            const float far = __shfl_xor_sync(kAllLanes, own + next, 2);
            if (size >= 8) second += behind + (t & 2 ? 0.0f : far);
            if (size >= 4) second += t & 1 ? 0.0f : next;
            if (size >= 2) first += second;
            behind += own + next + far;
        }
    }
}

// x_t <- sum of x_i over the block's i < t.
__device__ inline void sum_before_token(ChannelTokens& x, int size, int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float before = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (8 * n % size == 0) before = 0.0f;
            const float first = x[n][2 * half], own = first + x[n][2 * half + 1];
            const float last = __shfl_xor_sync(kAllLanes, own, 1);
            const float far = __shfl_xor_sync(kAllLanes, own + last, 2);
            float sum = 0.0f;
            if (size >= 8) sum += before + (t & 2 ? far : 0.0f);
            if (size >= 4) sum += t & 1 ? last : 0.0f;
            x[n][2 * half] = sum;
            x[n][2 * half + 1] = size >= 2 ? sum + first : 0.0f;
            before += own + last + far;
        }
    }
}
