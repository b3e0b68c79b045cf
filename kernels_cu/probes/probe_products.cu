// How fast a multiprocessor takes wgmma products with A in registers, by their width: what the
// fused chain's recurrence is built from. Nothing but products is timed.
//
// Four phases of `rounds` rounds; a round starts products one behind the other and waits for them all:
//   phase 0, 1: 8 and 40 products into one accumulator; 2, 3: 8 and 40 into kAccumulators in turn.
// Two phases' difference is free of what a round costs beside its products.
//
// KDA_WIDTH: columns of B, 8 to 128; those of 128 are read along B's columns, as the state's update does.
// KDA_WARPGROUPS: 1 or 2 that multiply at the same time.
//
// Out: cycles [block, phase, warp]; sums [block, thread], of the accumulators, so that they are needed.
// Grid: a block for every multiprocessor; 128 threads a warpgroup; static shared memory only.
#include "probes/clock.cuh"
#include "probes/ptx/wgmma_widths.cuh"
#include "ptx/convert.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"
#include "tile/shared/swizzled_tile.cuh"

namespace {

constexpr int kWidth = KDA_WIDTH;
constexpr int kThreads = 128 * KDA_WARPGROUPS;
constexpr int kAccumulators = kWidth == 128 ? 2 : 4;
constexpr int kFew = 8, kMany = 40;
constexpr int kPhases = 4;
constexpr int kSteps = 4;

// One swizzled operand of 64 channels for every row of B (kWidth below 128), or two tiles of 64 columns and 16 rows.
constexpr int kWords = kWidth * 32;

using Accumulator = float[kWidth / 2];

// Different for every x, in [-1, 1).
__device__ float scattered(u32 x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return static_cast<float>(static_cast<int>(x ^ (x >> 16))) * 0x1p-31f;
}

template <int kRegisters>
__device__ void multiply(float (&d)[kRegisters], const u32 (&a)[4], u32 operand, int step) {
    if constexpr (kRegisters == 64) {
        constexpr u64 kLayout = wgmma_layout(SwizzledTile::kBytes, 8 * SwizzledTile::kRowBytes, true);
        wgmma_rows(d, a, wgmma_descriptor(kLayout, (operand + step * 2 * SwizzledTile::kBytes) / 16));
    } else {
        constexpr u64 kLayout = wgmma_layout(16, 8 * SwizzledTile::kRowBytes, true);
        wgmma(d, a, wgmma_descriptor(kLayout, (operand + step * 32) / 16), true);
    }
}

template <int kInTurn, int kProducts>
__device__ void time_rounds(Accumulator (&d)[kAccumulators], const u32 (&a)[kSteps][4], u32 operand, int rounds,
                            int phase, i64* cycles) {
    __syncthreads();
    const i64 start = clock64();
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kProducts; ++i) multiply(d[i % kInTurn], a[i % kSteps], operand, i % kSteps);
        wgmma_commit();
        wgmma_wait<0>();
    }
    store_cycles(cycles, start, phase, kPhases);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    probe_products(i64* cycles, float* sums, int rounds) {
    __shared__ __align__(1024) u32 operand[kWords];
    for (int i = threadIdx.x; i < kWords; i += kThreads) {
        operand[i] = pack_f16(scattered(2 * i), scattered(2 * i + 1));
    }
    fence_shared_for_wgmma();
    __syncthreads();
    const u32 shared = hold_address(static_cast<u32>(__cvta_generic_to_shared(operand)));

    u32 a[kSteps][4];
    Accumulator d[kAccumulators];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 seed = kWords + ((i * 4 + j) * kThreads + threadIdx.x) * 2;
            a[i][j] = pack_f16(scattered(seed), scattered(seed + 1));
        }
    }
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth / 2; ++j) d[i][j] = 0.0f;
    }

    time_rounds<1, kFew>(d, a, shared, rounds, 0, cycles);
    time_rounds<1, kMany>(d, a, shared, rounds, 1, cycles);
    time_rounds<kAccumulators, kFew>(d, a, shared, rounds, 2, cycles);
    time_rounds<kAccumulators, kMany>(d, a, shared, rounds, 3, cycles);

    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth / 2; ++j) sum += d[i][j];
    }
    sums[blockIdx.x * kThreads + threadIdx.x] = sum;
}
