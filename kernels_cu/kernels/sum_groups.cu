// The gradients of q or k from the shares of the value heads that read one key head.
//
//   sums[t, h] = sum over i of shares[t, h group + i], in order, rounded once
//
// In:  shares [T, H group, 128] float32, 16-byte aligned; rows: T H.
// Out: sums [T, H, 128] of the element type, written.
// Grid: 8 warps a block, one for each row; a lane has 4 channels.
#include "tile/shared/element.cuh"

namespace {

constexpr int kSize = 128;
constexpr int kWarps = 8;

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    sum_groups(const float* shares, int rows, int group, Element* sums) {
    const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float4* from = reinterpret_cast<const float4*>(shares + static_cast<i64>(row) * group * kSize) + lane;
    float4 sum = from[0];
    for (int i = 1; i < group; ++i) {
        const float4 x = from[i * (kSize / 4)];
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    Element* to = sums + static_cast<i64>(row) * kSize + 4 * lane;
    from_float(to[0], sum.x);
    from_float(to[1], sum.y);
    from_float(to[2], sum.z);
    from_float(to[3], sum.w);
}
