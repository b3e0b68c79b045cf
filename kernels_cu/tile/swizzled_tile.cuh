// A tile of 16 tokens x kColumns 16-bit elements in shared memory. Row r is kColumns * 2 bytes; the 16-byte piece p of
// the row lies at piece p ^ (r % 8), so that the eight rows of one ldmatrix matrix fall into different banks.
//
// A lane's address for step s (columns 16 s to 16 s + 15) is its address for step 0 with bits 5 and up XORed by 32 s;
// this needs tiles that start at multiples of their row length.
#pragma once

#include "common/types.cuh"

template <int kColumns>
struct SwizzledTile {
    static_assert(kColumns == 64 || kColumns == 128, "eight pieces must exist to be exchanged");
    static constexpr int kRowBytes = kColumns * 2;
    static constexpr int kBytes = 16 * kRowBytes;

    __device__ static u32 piece(int row, int piece) { return row * kRowBytes + ((piece ^ (row & 7)) << 4); }

    // Matrices (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15): the A fragment of the tile as stored,
    // and read transposed the B fragments of two column groups with the tokens along k.
    __device__ static u32 rows_first(int lane) { return piece(lane & 15, lane >> 4); }

    // Matrices (rows 0-7, columns 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15): the B fragments of two token groups
    // with the columns along k, and read transposed an A fragment with the columns as its rows.
    __device__ static u32 columns_first(int lane) {
        return piece((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    }

    __device__ static u32 at_step(u32 lane_address, int step) { return lane_address ^ (step << 5); }
};

// A 16 x 16 tile of 16-bit elements as four 8 x 8 blocks (0,0), (0,1), (1,0), (1,1) of 128 bytes; a lane's ldmatrix
// address is 16 * lane, register i being block i.
struct BlockedSquare {
    static constexpr int kBytes = 512;
    __device__ static u32 at(int row, int column) {
        return (((row >> 3) * 2 + (column >> 3)) << 7) + ((row & 7) << 4) + ((column & 7) << 1);
    }
};
