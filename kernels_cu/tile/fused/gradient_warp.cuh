// A warp's part of a tile of sm90_gradients.cu: 16 channels of all tokens, in shared memory and in registers.
#pragma once

#include "ptx/matrix.cuh"
#include "tile/fused/gradient_pairs.cuh"
#include "tile/fused/gradient_tile.cuh"

// Element (token 8 n + 2t + e, channel g or g + 8) of the lane's packed columns of a chunk, as `ldmatrix_transposed`
// gives them: register (n % 2) + 2 (channel / 8).
__device__ inline void unpack_channels(ChannelTokens& x, const u32 (&packed)[2][4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 y = Pair::unpack(packed[n / 2][n % 2 + 2 * half]);
            x[n][2 * half] = y.x;
            x[n][2 * half + 1] = y.y;
        }
    }
}

__device__ inline void pack_channels(u32 (&packed)[2][4], const ChannelTokens& x) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            packed[n / 2][n % 2 + 2 * half] = Pair::pack(x[n][2 * half], x[n][2 * half + 1]);
        }
    }
}

__device__ inline void copy(ChannelTokens& to, const ChannelTokens& from) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[n][e] = from[n][e];
    }
}

struct WarpTile {
    unsigned char* memory;
    u32 shared;  // the same as a 32-bit address
    int warp, lane;

    __device__ explicit WarpTile(unsigned char* memory)
        : memory(memory),
          shared(static_cast<u32>(__cvta_generic_to_shared(memory))),
          warp(threadIdx.x / 32),
          lane(threadIdx.x % 32) {}

    // The first of the lane's two channels; the other is 8 further on.
    __device__ int channel() const { return 16 * warp + (lane >> 2); }

    __device__ float* floats(int at) const { return reinterpret_cast<float*>(memory + at); }

    // Of a value by token: those of the lane's tokens 8 n + 2t and 8 n + 2t + 1.
    __device__ float2 of_tokens(int at, int n) const {
        return reinterpret_cast<const float2*>(memory + at)[4 * n + (lane & 3)];
    }

    __device__ u32 own_columns() const {
        return SwizzledTile::step(SwizzledTile::rows_first(lane), warp, SwizzledTile::kBytes);
    }

    // The warp's 16 columns of one of the tiles of tokens.

    __device__ void fetch_chunk(u32 (&packed)[4], int tile, int chunk) const {
        ldmatrix_transposed(packed, shared + tile + chunk * Tile::kChunkBytes + own_columns());
    }

    __device__ void fetch(u32 (&packed)[2][4], int tile) const {
        fetch_chunk(packed[0], tile, 0);
        fetch_chunk(packed[1], tile, 1);
    }

    __device__ void fetch(ChannelTokens& x, int tile) const {
        u32 packed[2][4];
        fetch(packed, tile);
        unpack_channels(x, packed);
    }

    __device__ void store(int tile, const ChannelTokens& x) const {
        u32 packed[2][4];
        pack_channels(packed, x);
        stmatrix_transposed(shared + tile + own_columns(), packed[0]);
        stmatrix_transposed(shared + tile + Tile::kChunkBytes + own_columns(), packed[1]);
    }

    // Keys or queries with the norm.

    __device__ void fetch_key(ChannelTokens& x) const { fetch_normed(x, Tile::kKey, Tile::kNorms); }

    __device__ void fetch_query(ChannelTokens& x) const {
        fetch_normed(x, Tile::kQuery, Tile::kNorms + 4 * kTileTokens);
    }

    // A thread's values out of its registers for a while.

    __device__ void park(int area, const ChannelTokens& x) const {
        float4* place = reinterpret_cast<float4*>(memory + area) + threadIdx.x;
#pragma unroll
        for (int n = 0; n < 4; ++n) place[n * kThreads] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
    }

    __device__ void fetch_parked(ChannelTokens& x, int area) const {
        const float4* place = reinterpret_cast<const float4*>(memory + area) + threadIdx.x;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float4 y = place[n * kThreads];
            x[n][0] = y.x, x[n][1] = y.y, x[n][2] = y.z, x[n][3] = y.w;
        }
    }

  private:
    __device__ void fetch_normed(ChannelTokens& x, int tile, int norms) const {
        fetch(x, tile);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float2 r = of_tokens(norms, n);
            x[n][0] *= r.x, x[n][2] *= r.x;
            x[n][1] *= r.y, x[n][3] *= r.y;
        }
    }
};

// The gates of the warp's channels.
struct WarpGates {
    Gates gates;
    float bias[2];  // of dt_bias, with the gates' rate

    __device__ WarpGates(const Gates& gates, const float (&dt_bias)[2])
        : gates(gates), bias{gates.rate * dt_bias[0], gates.rate * dt_bias[1]} {}

    // Of a chunk, in units, as rows of channels.
    __device__ void fetch_units(u32 (&units)[4], const WarpTile& here, int chunk) const {
        u32 raw[4];
        here.fetch_chunk(raw, Tile::kGate, chunk);
        units[0] = gates.pair(raw[0], bias[0]), units[1] = gates.pair(raw[2], bias[1]);
        units[2] = gates.pair(raw[1], bias[0]), units[3] = gates.pair(raw[3], bias[1]);
    }

    // Whether one of the warp's tokens may decay by more than `most` units.
    __device__ bool decay_beyond(const WarpTile& here, float most) const {
        u32 raw[2][4];
        here.fetch(raw, Tile::kGate);
        return __any_sync(kAllLanes, gates.decays_beyond(raw, bias, most));
    }
};
