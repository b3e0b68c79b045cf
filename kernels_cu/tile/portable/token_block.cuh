// What a block of backward_tokens.cu has in shared memory: for one chunk and key head, kKeySize threads.
#pragma once

#include "common/shape.cuh"
#include "tile/portable/operands.cuh"
#include "varlen/chunk.cuh"

constexpr int kThreads = kKeySize;
constexpr int kWarps = kThreads / 32;
constexpr int kTokensPerWarp = kChunk / kWarps;

constexpr int kTile = 64;
// 16 (mod 32): the rows of a float4 fragment load lie in different banks.
constexpr int kTileStride = kTile + 16;
constexpr int kTileFloats = kChunk * kTileStride;
// 8 (mod 32): so do the rows of a float2 accumulator store.
constexpr int kStride = kKeySize + 8;
constexpr int kChannelFloats = kChunk * kStride;

// Shared memory: dO, dV and U of a tile, later dQ+, dK+ and dKr in the same place; then dq and dk.
constexpr int kPassing = 3 * (kTileFloats > kChannelFloats ? kTileFloats : kChannelFloats);

static_assert(kWarps >= 2, "one warp for dP, another for dG");

// Where the block is: its chunk's tokens, its key head, and strides in elements.
struct TokenBlock {
    ChunkPlace place;
    i64 chunk;
    int head, key_heads, value_heads, key_size, value_size;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    __device__ i64 key_stride() const { return static_cast<i64>(key_heads) * key_size; }

    // Of q and k: the warp's first token, the lane's first channel.
    __device__ i64 of_warp() const {
        return ((place.token + warp * kTokensPerWarp) * key_heads + head) * key_size + lane;
    }

    // How many of the warp's tokens are real, from the first on.
    __device__ int tokens_of_warp() const { return place.length - warp * kTokensPerWarp; }

    // How many of the lane's channels lie within the head, each 32 further on.
    __device__ int inside() const { return key_size - lane; }
};
