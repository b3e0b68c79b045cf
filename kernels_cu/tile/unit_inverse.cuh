// Inverse of a unit lower triangular 16 x 16 matrix by forward substitution in float32, one column a lane.
#pragma once

#include "common/types.cuh"

// lower: the strictly lower part, row-major [16][16] in shared memory, 16-byte aligned; nothing on or above the
// diagonal is used. column: lane's column of (I + lower)^-1; lanes 16 to 31 repeat lanes 0 to 15.
__device__ inline void unit_lower_inverse(float (&column)[16], const float* lower, int lane) {
    const int own = lane & 15;
#pragma unroll
    for (int row = 0; row < 16; ++row) {
        float sum = row == own ? 1.0f : 0.0f;
#pragma unroll
        for (int group = 0; 4 * group < row; ++group) {
            const float4 factors = reinterpret_cast<const float4*>(lower)[4 * row + group];
            sum -= factors.x * column[4 * group];
            if (4 * group + 1 < row) sum -= factors.y * column[4 * group + 1];
            if (4 * group + 2 < row) sum -= factors.z * column[4 * group + 2];
            if (4 * group + 3 < row) sum -= factors.w * column[4 * group + 3];
        }
        column[row] = sum;
    }
}
