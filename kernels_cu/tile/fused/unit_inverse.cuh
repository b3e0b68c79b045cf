// Inverse of a unit lower triangular 16 x 16 matrix by forward substitution in float32, one column a lane.
#pragma once

#include "common/types.cuh"
#include "ptx/registers.cuh"

// Where an element lies in shared memory: columns behind each other, their groups of four rows exchanged so that lanes
// which store neighbouring columns meet fewer bank conflicts.
__device__ inline int lower_place(int row, int column) {
    return 16 * column + 4 * ((row / 4) ^ (column / 2 % 4)) + row % 4;
}

// lower: the strictly lower part, in the order of `lower_place`, 16-byte aligned; nothing on or above the diagonal is
// used. column: lane's column of (I + lower)^-1; lanes 16 to 31 repeat lanes 0 to 15.
//
// A finished row is taken from all later ones at once: the loads wait for nothing, and what follows a row is independent.
__device__ inline void unit_lower_inverse(float (&column)[16], const float* lower, int lane) {
    int own = lane & 15;
    hold(own);
#pragma unroll
    for (int row = 0; row < 16; ++row) column[row] = row == own ? 1.0f : 0.0f;
#pragma unroll
    for (int row = 0; row < 15; ++row) {
#pragma unroll
        for (int group = (row + 1) / 4; group < 4; ++group) {
            const float4 factors = reinterpret_cast<const float4*>(lower)[lower_place(4 * group, row) / 4];
            if (4 * group > row) column[4 * group] -= factors.x * column[row];
            if (4 * group + 1 > row) column[4 * group + 1] -= factors.y * column[row];
            if (4 * group + 2 > row) column[4 * group + 2] -= factors.z * column[row];
            column[4 * group + 3] -= factors.w * column[row];
        }
    }
}
