// The records of a chain of chunks, brought one after another into shared memory, all threads of the block copying.
//
// kStages slots; the copy of chunk c + kStages - 1 runs while chunk c is used. `next` is called by all threads once a
// chunk, in order; the record it returns is valid until the next call.
#pragma once

#include "common/types.cuh"
#include "ptx/copy.cuh"
#include "tile/portable/operands.cuh"

constexpr int kStages = KDA_STAGES;
static_assert(kStages >= 1);

struct RecordPipe {
    float* slots;         // shared, kStages records
    const float* records; // the chain's first record
    i64 stride;           // floats from one chunk's record to the next
    int chunks;

    __device__ void start() {
        for (int chunk = 0; chunk < kStages - 1; ++chunk) copy(chunk);
    }

    __device__ const float* next(int chunk) {
        if constexpr (kStages == 1) {
            __syncthreads();
            copy(chunk);
            cp_async_wait<0>();
            __syncthreads();
        } else {
            cp_async_wait<kStages - 2>();
            // Behind this barrier the chunk has arrived for all threads, and all are done with the slot refilled next.
            __syncthreads();
            copy(chunk + kStages - 1);
        }
        return slots + chunk % kStages * kRecord;
    }

  private:
    // One group per call, empty past the chain's end, so that the count of pending groups is the same at every chunk.
    __device__ void copy(int chunk) {
        if (chunk < chunks) {
            float* slot = slots + chunk % kStages * kRecord;
            const float* record = records + chunk * stride;
            for (int i = 4 * threadIdx.x; i < kRecord; i += 4 * blockDim.x) cp_async(slot + i, record + i);
        }
        cp_async_commit();
    }
};
