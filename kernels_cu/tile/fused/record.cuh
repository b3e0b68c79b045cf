// What the chains leave for the gradients' kernel, for every tile of 32 tokens (two chunks, the first even in its
// sequence) and value head: the forward the state before the tile and U, the backward the state's gradient behind the
// tile and X (dV = Diag(beta) X).
//
// Float16 times the unit of the warp that wrote it (tile/fused/state.cuh; U may have its own), in blocks of 8 value columns x 8 channels or
// tokens, row by row, 128 bytes each: a warp writes a block with one store, and `ldmatrix` reads it without conflicts.
//   states [tile,HV]: blocks [value column / 8][channel / 8];  tokens [tile,HV]: blocks [value column / 8][token / 8].
//   units [tile,HV,rows,8]: powers of two by 16 value columns; rows as below. A tile's second chunk may be missing: its
//   tokens and units are then not written.
#pragma once

#include "common/types.cuh"

// K and V of the chain kernels.
constexpr int kSize = 128;

constexpr int kTileChunks = 2;

struct Record {
    static constexpr int kBlockWords = 32;
    static constexpr int kBlocks = kSize / 8;
    static constexpr int kTokenBlocks = 4;
    static constexpr int kStateWords = kBlocks * kBlocks * kBlockWords;
    static constexpr int kTokenWords = kBlocks * kTokenBlocks * kBlockWords;
    // Rows of the units: of the state, of the first and the second chunk's tokens, and (backward) the largest |dO| of
    // each chunk, which is no unit.
    static constexpr int kUnits = 8;
    static constexpr int kStateUnit = 0;
    static constexpr int kTokenUnit = 1;
    static constexpr int kLargestOut = 3;
    static constexpr int kForwardUnits = 3 * kUnits;
    static constexpr int kBackwardUnits = 5 * kUnits;
};

// Where a launch puts them.
struct Records {
    u32* states;
    u32* tokens;
    float* units;
};

// The place of one warp of 16 value columns in the records of a tile.
struct RecordPlace {
    u32* state;
    u32* tokens;
    float* units;

    __device__ RecordPlace(const Records& records, i64 tile_and_head, int units_of_tile, int first_column, int lane)
        : state(records.states + tile_and_head * Record::kStateWords +
                first_column / 8 * (Record::kBlocks * Record::kBlockWords) + lane),
          tokens(records.tokens + tile_and_head * Record::kTokenWords +
                 first_column / 8 * (Record::kTokenBlocks * Record::kBlockWords) + lane),
          units(records.units + tile_and_head * units_of_tile + first_column / 16) {}

    // rounded: the state as A fragments, by 16 channels.
    template <int kSteps>
    __device__ void store_state(const u32 (&rounded)[kSteps][4], float unit, int lane) const {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                state[((i & 1) * Record::kBlocks + 2 * step + (i >> 1)) * Record::kBlockWords] = rounded[step][i];
            }
        }
        if (lane == 0) units[Record::kStateUnit * Record::kUnits] = unit;
    }

    // packed: the chunk's tokens as an A fragment along k.
    __device__ void store_tokens(const u32 (&packed)[4], int chunk, float unit, int lane) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            tokens[((i & 1) * Record::kTokenBlocks + 2 * chunk + (i >> 1)) * Record::kBlockWords] = packed[i];
        }
        if (lane == 0) units[(Record::kTokenUnit + chunk) * Record::kUnits] = unit;
    }
};
