// The records of a chain of chunks, brought from the last to the first into shared memory, all threads of the block
// copying. A record's blocks (tile/portable/operands.cuh) are in the order that the forward's products want; the
// backward's contract over the other index, so here they are turned back into plain [token, channel] tiles on the way.
//
// Strides put the rows and columns of a fragment load into different banks: reading two neighbouring tokens of one
// channel needs a stride of 4 (mod 32) floats, reading two neighbouring channels of one token a stride of 8.
//
// `next` is called by all threads once a chunk; what it returns is valid until the next call.
#pragma once

#include "common/types.cuh"
#include "ptx/copy.cuh"
#include "tile/portable/operand_pipe.cuh"
#include "tile/portable/operands.cuh"

constexpr int kKeyInStride = kKeySize + 4;   // also of Q+
constexpr int kKeyOutStride = kKeySize + 8;
constexpr int kSquareStride = kChunk + 4;

constexpr int kTurnedQueryIn = kChunk * kKeyInStride;
constexpr int kTurnedKeyOut = kTurnedQueryIn + kChunk * kKeyInStride;
constexpr int kTurnedDecay = kTurnedKeyOut + kChunk * kKeyOutStride;
constexpr int kTurnedSolve = kTurnedDecay + kKeySize;
constexpr int kTurnedAttend = kTurnedSolve + kChunk * kSquareStride;
// Floats of one slot; the kernel table (kda_engine/device/kernels.py) knows this number too.
constexpr int kTurned = kTurnedAttend + kChunk * kSquareStride;
static_assert(kTurned % 4 == 0 && kTurnedDecay % 4 == 0);

// One chunk's operands in shared memory.
struct TurnedChunk {
    const float* key_in;
    const float* query_in;
    const float* key_out;
    const float* decay;
    const float* solve;
    const float* attend;
};

// kThreads: of the block.
template <int kThreads>
struct TurningPipe {
    float* slots;          // shared, kStages slots
    const float* records;  // the chain's first record
    i64 stride;            // floats from one chunk's record to the next
    int chunks;

    __device__ void start() {
        for (int number = 0; number < kStages - 1; ++number) copy(number);
    }

    // number: 0 for the chain's last chunk.
    __device__ TurnedChunk next(int number) {
        if constexpr (kStages == 1) {
            __syncthreads();
            copy(number);
            cp_async_wait<0>();
            __syncthreads();
        } else {
            cp_async_wait<kStages - 2>();
            // Behind this barrier the chunk has arrived for all threads, and all are done with the slot refilled next.
            __syncthreads();
            copy(number + kStages - 1);
        }
        const float* slot = slots + number % kStages * kTurned;
        return {slot,
                slot + kTurnedQueryIn,
                slot + kTurnedKeyOut,
                slot + kTurnedDecay,
                slot + kTurnedSolve,
                slot + kTurnedAttend};
    }

  private:
    // One group per call, empty before the chain's start, so that the count of pending groups is always the same.
    __device__ void copy(int number) {
        if (number < chunks) {
            float* slot = slots + number % kStages * kTurned;
            const float* record = records + (chunks - 1 - number) * stride;
            copy_rows(slot, kKeyInStride, record + kKeyIn, kKeySize);
            copy_rows(slot + kTurnedQueryIn, kKeyInStride, record + kQueryIn, kKeySize);
            copy_columns(slot + kTurnedKeyOut, kKeyOutStride, record + kKeyOut);
            for (int i = 4 * threadIdx.x; i < kKeySize; i += 4 * kThreads) {
                cp_async(slot + kTurnedDecay + i, record + kDecay + i);
            }
            copy_rows(slot + kTurnedSolve, kSquareStride, record + kSolve, kChunk);
            copy_rows(slot + kTurnedAttend, kSquareStride, record + kAttend, kChunk);
        }
        cp_async_commit();
    }

    // A row operand of so many columns; float4 i holds (row g, columns c, c + 1) and (row g + 8, the same).
    __device__ static void copy_rows(float* tile, int tile_stride, const float* operand, int columns) {
#pragma unroll 4
        for (int i = threadIdx.x; i < kChunk * columns / 4; i += kThreads) {
            const int lane = i % 32;
            float* at = tile + lane / 4 * tile_stride + i / 32 * 8 + 2 * (lane % 4);
            cp_async_8(at, operand + 4 * i);
            cp_async_8(at + 8 * tile_stride, operand + 4 * i + 2);
        }
    }

    // A column operand of kKeySize columns; float4 i holds column c at rows r, r + 1, r + 8, r + 9.
    __device__ static void copy_columns(float* tile, int tile_stride, const float* operand) {
#pragma unroll 4
        for (int i = threadIdx.x; i < kChunk * kKeySize / 4; i += kThreads) {
            const int lane = i % 32;
            float* at = tile + 2 * (lane % 4) * tile_stride + i / 32 * 8 + lane / 4;
            cp_async_4(at, operand + 4 * i);
            cp_async_4(at + tile_stride, operand + 4 * i + 1);
            cp_async_4(at + 8 * tile_stride, operand + 4 * i + 2);
            cp_async_4(at + 9 * tile_stride, operand + 4 * i + 3);
        }
    }
};
