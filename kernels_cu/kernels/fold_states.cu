// Folds the pieces of cut sequences: the state behind every piece from the states reached from zero.
//
//   state_r <- M_r state_(r-1) + S_r   for r = 1 .. links, per value head, in float32
//
// KDA_REVERSED 1: the gradients of the states, with M_r transposed, and the slots count down from the first.
//
// In:  chains [chains] (one row a cut sequence); transitions [slot,HV,128,128] float32, row-major [out, in].
// In, out: carried [slot,HV,128,128] float32 [K,V]: slot first holds the first piece's true last state, slot first + r
//      S_r; afterwards slot first + r holds state_r; M_r is `slots_behind` slots behind S_r's. Slots of different chains are
//      disjoint.
//      warmup_chunks [slot,HV] (kernels/certify_cuts.cu) or null: where it is not negative, S_r is state_r already and
//      M_r is not read.
// Grid: one block for each chain, head and block of kColumns value columns, the columns fastest; 256 threads,
// kSharedBytes of dynamic shared memory. A block reads and writes only its own columns; M_(r+1) is copied while M_r is
// applied.
#include "common/types.cuh"
#include "ptx/copy.cuh"

namespace {

constexpr bool kReversed = KDA_REVERSED != 0;
constexpr int kSize = 128;
constexpr int kColumns = 8;
constexpr int kThreads = 256;
constexpr int kOwn = kSize * kColumns / kThreads;  // columns of one row a thread owns
// Four floats of padding put the rows of a quarter warp into different banks.
constexpr int kStride = kSize + 4;
constexpr int kMatrix = kSize * kStride;
constexpr int kSharedBytes = 4 * (2 * kMatrix + kSize * kColumns);
static_assert(kOwn == 4, "a thread's columns are one float4");
static_assert(kSharedBytes == KDA_SHARED_BYTES, "the launch table must know");

struct Chain {
    int first_slot;
    int links;
};

__device__ void copy_matrix(float* shared, const float* global) {
    for (int i = threadIdx.x; i < kSize * kSize / 4; i += kThreads) {
        cp_async(shared + (i / (kSize / 4)) * kStride + 4 * (i % (kSize / 4)), global + 4 * static_cast<i64>(i));
    }
    cp_async_commit();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fold_states(const Chain* chains, const float* transitions, float* carried, const int* warmup_chunks, int value_heads,
                int slots_behind) {
    extern __shared__ __align__(16) float shared[];
    float* state = shared + 2 * kMatrix;
    constexpr int kBlocks = kSize / kColumns;
    const int first_column = blockIdx.x % kBlocks * kColumns, chain_and_head = blockIdx.x / kBlocks;
    const int head = chain_and_head % value_heads;
    const Chain chain = chains[chain_and_head / value_heads];
    if (chain.links == 0) return;
    const int row = threadIdx.x / 2, column = kOwn * (threadIdx.x % 2);
    constexpr int kDirection = kReversed ? -1 : 1;
    const i64 slot_size = static_cast<i64>(value_heads) * kSize * kSize, to_next = kDirection * slot_size;
    const i64 offset = chain.first_slot * slot_size + static_cast<i64>(head) * kSize * kSize;
    const float* matrix = transitions + offset + to_next + slots_behind * slot_size;
    float* own = carried + offset + row * kSize + first_column + column;

    // Uniform in the block.
    const auto certified = [&](int link) {
        return warmup_chunks != nullptr &&
               warmup_chunks[static_cast<i64>(chain.first_slot + kDirection * (1 + link)) * value_heads + head] >= 0;
    };

    if (!certified(0)) copy_matrix(shared, matrix);
    *reinterpret_cast<float4*>(state + row * kColumns + column) = *reinterpret_cast<const float4*>(own);
    for (int link = 0; link < chain.links; ++link) {
        own += to_next;
        float4 sum = *reinterpret_cast<const float4*>(own);
        matrix += to_next;
        if (link + 1 < chain.links && !certified(link + 1)) {
            copy_matrix(shared + ((link + 1) & 1) * kMatrix, matrix);
            cp_async_wait<1>();
        } else {
            cp_async_wait<0>();
        }
        __syncthreads();
        if (certified(link)) {
            *reinterpret_cast<float4*>(state + row * kColumns + column) = sum;
            continue;
        }
        const float* factors = shared + (link & 1) * kMatrix + row * (kReversed ? 1 : kStride);
#pragma unroll 8
        for (int k = 0; k < kSize; k += 4) {
            float f[4];
            if constexpr (kReversed) {
#pragma unroll
                for (int i = 0; i < 4; ++i) f[i] = factors[(k + i) * kStride];
            } else {
                const float4 m = *reinterpret_cast<const float4*>(factors + k);
                f[0] = m.x, f[1] = m.y, f[2] = m.z, f[3] = m.w;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 s = *reinterpret_cast<const float4*>(state + (k + i) * kColumns + column);
                sum.x = fmaf(f[i], s.x, sum.x);
                sum.y = fmaf(f[i], s.y, sum.y);
                sum.z = fmaf(f[i], s.z, sum.z);
                sum.w = fmaf(f[i], s.w, sum.w);
            }
        }
        __syncthreads();
        *reinterpret_cast<float4*>(state + row * kColumns + column) = sum;
        *reinterpret_cast<float4*>(own) = sum;
    }
}
