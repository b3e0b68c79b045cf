// Outputs and final states from prepared chunks and the state that enters each span.
//
//   R = V - K+ S;  U = N Diag(beta) R;  O = Q+ S + P U;  S <- Diag(e^gamma_C) S + Kr^T U        per chunk, in order
//
// In:  records [chunks, HV, kRecord] of `prepare`; v [T,HV,V]; initial [spans,HV,K,V] float32.
// Out: out [T,HV,V], every token of every span; final [sequences,HV,K,V] float32, by the last span of each sequence.
//      Both written, not accumulated.
// Grid: one block per (span, value head, tile of value columns), the tile fastest; one warp per 16 columns of the tile,
// at most kMostWarps; kStages records of dynamic shared memory. A warp owns its columns of the state; the block shares
// only the records, so that wide tiles read them less often. Warps past the last column only help to copy.
#include "tile/portable/operand_pipe.cuh"
#include "tile/portable/state.cuh"
#include "tile/portable/values.cuh"
#include "varlen/span.cuh"

namespace {

constexpr int kMostWarps = 8;

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kMostWarps, 1)
forward(const float* records, const Element* v, const float* initial, const i64* cu_seqlens, const i64* chunk_offsets,
        const i64* span_chunks, const int* span_sequences, int spans, int value_heads, int key_size, int value_size,
        Element* out, float* final) {
    extern __shared__ float4 dynamic_shared[];
    const int tile_columns = blockDim.x / 32 * kStripColumns;
    const int tiles = (value_size + tile_columns - 1) / tile_columns;
    const int head = blockIdx.x / tiles % value_heads;
    const int number = blockIdx.x / tiles / value_heads;
    const int first_column = blockIdx.x % tiles * tile_columns + threadIdx.x / 32 * kStripColumns;
    const Span span = place_span(number, spans, span_chunks, span_sequences, chunk_offsets, cu_seqlens);
    const i64 state_size = static_cast<i64>(key_size) * value_size;

    StateStrip state;
    state.load(initial + (static_cast<i64>(number) * value_heads + head) * state_size + first_column, value_size,
               key_size, value_size - first_column);

    const ValueStrip<const Element*> values(v, value_heads, head, value_size, first_column);
    const ValueStrip<Element*> outputs(out, value_heads, head, value_size, first_column);
    RecordPipe pipe{reinterpret_cast<float*>(dynamic_shared),
                    records + (span.first_chunk * value_heads + head) * kRecord,
                    static_cast<i64>(value_heads) * kRecord, span.chunks};
    pipe.start();
    StripRows coming = values.load(span.token, span.end);
    for (int chunk = 0; chunk < span.chunks; ++chunk) {
        const float* record = pipe.next(chunk);
        const i64 token = span.token + static_cast<i64>(chunk) * kChunk;
        const StripRows now = coming;
        // The chunk behind the span's last belongs to the next span or lies past the end; it is loaded unused.
        coming = values.load(token + kChunk, span.end);
        if (first_column < value_size) {
            StripRows result;
            state.advance<true>(record, now, result);
            outputs.store(result, token, span.end);
        }
    }
    if (span.last) {
        state.store(final + (static_cast<i64>(span.sequence) * value_heads + head) * state_size + first_column,
                    value_size, key_size, value_size - first_column);
    }
}
