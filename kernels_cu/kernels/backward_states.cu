// The state that enters every chunk, and what each token writes into it.
//
//   R = V - K+ S;  U = N Diag(beta) R;  S <- Diag(e^gamma_C) S + Kr^T U        per chunk, in order
//
// In:  records [chunks, HV, kRecord] of `prepare`; v [T,HV,V]; initial [spans,HV,K,V] float32.
// Out: states [chunks,HV,kKeySize,columns] and writes (U) [chunks,HV,kChunk,columns] float32, columns = V rounded up to
//      16. Written, padding included.
// Grid: one block per (span, value head, tile of kTileColumns value columns), the tile fastest; kTileWarps warps;
// kStages records of dynamic shared memory. A warp owns 16 columns of the state; the block shares only the records.
#include "tile/portable/backward_state.cuh"
#include "tile/portable/backward_values.cuh"
#include "tile/portable/operand_pipe.cuh"
#include "varlen/span.cuh"

extern "C" __global__ void __launch_bounds__(32 * kTileWarps, 2)
backward_states(const float* records, const Element* v, const float* initial, const i64* cu_seqlens,
                const i64* chunk_offsets, const i64* span_chunks, const int* span_sequences, int spans,
                int value_heads, int key_size, int value_size, float* states, float* writes) {
    extern __shared__ float4 dynamic_shared[];
    const int tiles = tiles_of(value_size);
    const int head = blockIdx.x / tiles % value_heads;
    const int number = blockIdx.x / tiles / value_heads;
    const int first_column = blockIdx.x % tiles * kTileColumns + threadIdx.x / 32 * kStripColumns;
    const Span span = place_span(number, spans, span_chunks, span_sequences, chunk_offsets, cu_seqlens);

    StateStrip state;
    state.load(initial + (static_cast<i64>(number) * value_heads + head) * key_size * value_size + first_column,
               value_size, key_size, value_size - first_column);

    const int columns = padded_columns(value_size);
    const PendingStrip values(v, value_heads, head, value_size, first_column);
    RecordPipe pipe{reinterpret_cast<float*>(dynamic_shared),
                    records + (span.first_chunk * value_heads + head) * kRecord,
                    static_cast<i64>(value_heads) * kRecord, span.chunks};
    pipe.start();
    PendingRows coming = values.load(span.token, span.end);
    for (int chunk = 0; chunk < span.chunks; ++chunk) {
        const float* record = pipe.next(chunk);
        const StripRows now = coming.arrived();
        // The chunk behind the span's last belongs to the next span or lies past the end; it is loaded unused.
        coming = values.load(span.token + static_cast<i64>(chunk + 1) * kChunk, span.end);
        const i64 of_chunk = (span.first_chunk + chunk) * value_heads + head;
        const bool kept = first_column < columns;
        if (kept) keep_state(state, states + of_chunk * kKeySize * columns + first_column, columns);
        StripRows unused;
        const StripRows written = state.advance<false>(record, now, unused);
        if (kept) keep_rows(written, writes + of_chunk * kChunk * columns + first_column, columns);
    }
}
