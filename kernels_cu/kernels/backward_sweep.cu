// The gradient of the state, carried from the last chunk of each span to its first.
//
//   dU = P^T dO + Kr dS';  dV = (N Diag(beta))^T dU;  dS = Diag(e^gamma_C) dS' + Q+^T dO - K+^T dV
//
// In:  records [chunks, HV, kRecord] of `prepare`; d_out [T,HV,V]; d_leaving [spans,HV,K,V] float32 or null (zeros): the
//      gradient of the state behind each span.
// Out: d_entering [spans,HV,K,V] float32: of the state before each span. d_states [chunks,HV,kKeySize,columns] (dS' of
//      every chunk) and d_values [chunks,HV,kChunk,columns] (dV), float32, columns = V rounded up to 16; both null: not
//      wanted. All written, padding included.
// Grid: one block per (span, value head, tile of kTileColumns value columns), the tile fastest; kTileWarps warps;
// kStages slots of kTurned floats of dynamic shared memory. A warp owns 16 columns; the block shares only the slots.
#include "tile/portable/backward_pipe.cuh"
#include "tile/portable/backward_state.cuh"
#include "tile/portable/backward_values.cuh"
#include "varlen/span.cuh"

extern "C" __global__ void __launch_bounds__(32 * kTileWarps, 2)
backward_sweep(const float* records, const Element* d_out, const float* d_leaving, const i64* cu_seqlens,
               const i64* chunk_offsets, const i64* span_chunks, const int* span_sequences, int spans,
               int value_heads, int key_size, int value_size, float* d_entering, float* d_states, float* d_values) {
    extern __shared__ float4 dynamic_shared[];
    const int tiles = tiles_of(value_size);
    const int head = blockIdx.x / tiles % value_heads;
    const int number = blockIdx.x / tiles / value_heads;
    const int first_column = blockIdx.x % tiles * kTileColumns + threadIdx.x / 32 * kStripColumns;
    const Span span = place_span(number, spans, span_chunks, span_sequences, chunk_offsets, cu_seqlens);
    const i64 place = (static_cast<i64>(number) * value_heads + head) * key_size * value_size + first_column;

    StateStrip d_state;
    if (d_leaving != nullptr) {
        d_state.load(d_leaving + place, value_size, key_size, value_size - first_column);
    } else {
        d_state.identity(0, 0);
    }

    const int columns = padded_columns(value_size);
    const bool kept = d_states != nullptr && first_column < columns;
    const PendingStrip output_gradients(d_out, value_heads, head, value_size, first_column);
    TurningPipe<32 * kTileWarps> pipe{reinterpret_cast<float*>(dynamic_shared),
                                      records + (span.first_chunk * value_heads + head) * kRecord,
                                      static_cast<i64>(value_heads) * kRecord, span.chunks};
    pipe.start();
    const auto load = [&](int chunk) {
        const i64 token = span.token + static_cast<i64>(chunk) * kChunk;
        // The chunk before the span's first is not read: it ends where it starts.
        return output_gradients.load(token, chunk < 0 ? token : span.end);
    };
    PendingRows coming = load(span.chunks - 1);
    for (int i = 0; i < span.chunks; ++i) {
        const int chunk = span.chunks - 1 - i;
        const TurnedChunk operands = pipe.next(i);
        const StripRows now = coming.arrived();
        coming = load(chunk - 1);
        const i64 of_chunk = (span.first_chunk + chunk) * value_heads + head;
        if (kept) keep_state(d_state, d_states + of_chunk * kKeySize * columns + first_column, columns);
        const StripRows dv = take_back(d_state, operands, now);
        if (kept) keep_rows(dv, d_values + of_chunk * kChunk * columns + first_column, columns);
    }
    d_state.store(d_entering + place, value_size, key_size, value_size - first_column);
}
