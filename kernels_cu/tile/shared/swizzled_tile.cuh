// Tiles of 16 tokens x 64 16-bit elements in shared memory, 128 bytes a token. The 16-byte piece p of row r lies at
// piece p ^ (r % 8): the eight rows of one ldmatrix matrix fall into different banks, and it is the 128-byte swizzle of
// wgmma. Wider operands are tiles side by side at a distance of their choice. Tiles start at multiples of 1024 bytes.
#pragma once

#include "common/types.cuh"

struct SwizzledTile {
    static constexpr int kColumns = 64;
    static constexpr int kRowBytes = 2 * kColumns;
    static constexpr int kBytes = 16 * kRowBytes;

    __device__ static u32 piece(int row, int piece) { return row * kRowBytes + ((piece ^ (row & 7)) << 4); }

    // A lane's ldmatrix addresses for columns 0 to 15; `step` moves them by 16 columns a step, over tiles that lie
    // `distance` bytes apart.
    //
    // Matrices (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15): the A fragment of the tile as stored;
    // read transposed, the B fragments of two column groups with the tokens along k.
    __device__ static u32 rows_first(int lane) { return piece(lane & 15, lane >> 4); }

    // Matrices (rows 0-7, columns 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15): read transposed, an A fragment with
    // the columns as its rows.
    __device__ static u32 columns_first(int lane) {
        return piece((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    }

    __device__ static u32 step(u32 address, int step, u32 distance) {
        return (address ^ ((step & 3) << 5)) + (step >> 2) * distance;
    }
};

// A 16 x 16 tile of 16-bit elements as four 8 x 8 blocks (0,0), (0,1), (1,0), (1,1) of 128 bytes: wgmma's layout
// without swizzle.
struct BlockedSquare {
    static constexpr int kBytes = 512;
    static constexpr int kAlongRow = 128;
    static constexpr int kAlongColumn = 256;
    __device__ static u32 at(int row, int column) {
        return (row >> 3) * kAlongColumn + (column >> 3) * kAlongRow + ((row & 7) << 4) + ((column & 7) << 1);
    }
};
