// The state that enters each span of every sequence, from the spans' affine maps.
//
//   states[first] = initial;  states[i + 1] = M_i states[i] + S_i
//
// In:  transition [maps,HV,K,K], reached [maps,HV,K,V] or null (zeros): the maps of all spans but each sequence's last,
//      in order; initial [sequences,HV,K,V]; sequence_spans [sequences + 1]: number of the first span of each sequence.
// Out: states [spans,HV,K,V], every element written. All float32, float32 arithmetic in a fixed order.
// Grid: one block per (sequence, value head, tile of kColumns value columns), the tile fastest; kKeySize threads, each
// a channel of the state.
#include "common/types.cuh"
#include "tile/portable/operands.cuh"

namespace {

constexpr int kColumns = 16;
constexpr int kDepth = 16;  // columns of M in shared memory at a time

}  // namespace

extern "C" __global__ void __launch_bounds__(kKeySize)
scan(const float* transition, const float* reached, const float* initial, const i64* sequence_spans, int value_heads,
     int key_size, int value_size, float* states) {
    __shared__ float state[kKeySize][kColumns];
    __shared__ float map[kKeySize][kDepth + 1];
    const int channel = threadIdx.x;
    const int tiles = (value_size + kColumns - 1) / kColumns;
    const int first_column = blockIdx.x % tiles * kColumns;
    const int head = blockIdx.x / tiles % value_heads;
    const int sequence = blockIdx.x / tiles / value_heads;
    const i64 first = sequence_spans[sequence], behind = sequence_spans[sequence + 1];
    const auto place = [&](i64 number, int column) {
        return ((number * value_heads + head) * key_size + channel) * value_size + first_column + column;
    };
    const auto real = [&](int column) { return channel < key_size && first_column + column < value_size; };

    float carried[kColumns];
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
        carried[column] = real(column) ? initial[place(sequence, column)] : 0.0f;
    }
    for (i64 span = first; span < behind; ++span) {
        __syncthreads();
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            state[channel][column] = carried[column];
            if (real(column)) states[place(span, column)] = carried[column];
        }
        if (span + 1 == behind) break;
        const i64 number = span - sequence;  // each earlier sequence left out its last span
        const float* rows = transition + (number * value_heads + head) * key_size * key_size;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            carried[column] = reached != nullptr && real(column) ? reached[place(number, column)] : 0.0f;
        }
        for (int depth = 0; depth < key_size; depth += kDepth) {
            __syncthreads();
            for (int i = threadIdx.x; i < kKeySize * kDepth; i += kKeySize) {
                const int row = i / kDepth, column = i % kDepth;
                const bool inside = row < key_size && depth + column < key_size;
                map[row][column] = inside ? rows[static_cast<i64>(row) * key_size + depth + column] : 0.0f;
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < kDepth; ++i) {
#pragma unroll
                for (int column = 0; column < kColumns; ++column) {
                    carried[column] = fmaf(map[channel][i], state[depth + i][column], carried[column]);
                }
            }
        }
    }
}
