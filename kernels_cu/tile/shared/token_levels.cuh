// Pairs of tokens by levels: a level of size s (a power of two) pairs the tokens of every second block of s with those of
// the block before it, so that every pair of different tokens meets in one level. Size 0: each token with itself.
#pragma once

#include "common/types.cuh"

struct TokenLevel {
    int size;

    // Whether the token is in the second of its two blocks.
    __device__ bool is_row(int token) const { return (token & size) != 0; }

    // The last token before the place where the token's two blocks meet.
    __device__ int middle(int token) const { return (token & ~(2 * size - 1)) + size - 1; }

    __device__ bool meets(int row, int column) const {
        return size == 0 ? row == column : is_row(row) && !is_row(column) && (row ^ column) < 2 * size;
    }

    // 1 in float16 where a decay of tokens `first` and `first` + 1 lies between the token and its blocks' meeting place.
    __device__ u32 range(int token, int first) const {
        const int middle = size == 0 ? token : this->middle(token);
        const auto one = [&](int m) {
            return token > middle ? m > middle && m <= token : m > token && m <= middle;
        };
        return (one(first) ? 0x3c00u : 0u) | (one(first + 1) ? 0x3c000000u : 0u);
    }
};
