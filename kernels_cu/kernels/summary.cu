// The affine map of each span, S_out = M S_in + S, from prepared chunks.
//
//   M: the recurrence from the identity with V = 0;  S: the recurrence from the given state
//
// In:  records [chunks, HV, kRecord] of `prepare`; v [T,HV,V]; initial [spans,HV,K,V] float32 or null (zeros).
// Out: transition [spans,HV,K,K] float32, or null: then not computed; reached [spans,HV,K,V] float32. Written.
// Grid: one block per (span, value head, tile of columns of [S | M]), the tile fastest, S's tiles first, M's only if
// wanted; one warp per 16 columns of the tile, at most kMostWarps; kStages records of dynamic shared memory. Warps past
// the last column only help to copy.
#include "tile/portable/operand_pipe.cuh"
#include "tile/portable/state.cuh"
#include "tile/portable/values.cuh"
#include "varlen/span.cuh"

namespace {

constexpr int kMostWarps = 8;

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kMostWarps, 1)
summary(const float* records, const Element* v, const float* initial, const i64* cu_seqlens, const i64* chunk_offsets,
        const i64* span_chunks, const int* span_sequences, int spans, int value_heads, int key_size, int value_size,
        float* transition, float* reached) {
    extern __shared__ float4 dynamic_shared[];
    const int tile_columns = blockDim.x / 32 * kStripColumns;
    const int value_tiles = (value_size + tile_columns - 1) / tile_columns;
    const int map_tiles = transition == nullptr ? 0 : (key_size + tile_columns - 1) / tile_columns;
    const int tiles = value_tiles + map_tiles;
    const int tile = blockIdx.x % tiles;
    const int head = blockIdx.x / tiles % value_heads;
    const int number = blockIdx.x / tiles / value_heads;
    const Span span = place_span(number, spans, span_chunks, span_sequences, chunk_offsets, cu_seqlens);
    const bool of_state = tile < value_tiles;
    const int columns = of_state ? value_size : key_size;
    const int first_column = (of_state ? tile : tile - value_tiles) * tile_columns + threadIdx.x / 32 * kStripColumns;
    const i64 place = (static_cast<i64>(number) * value_heads + head) * key_size * columns + first_column;

    StateStrip state;
    if (of_state && initial != nullptr) {
        state.load(initial + place, columns, key_size, columns - first_column);
    } else {
        state.identity(first_column, of_state ? 0 : columns - first_column);
    }

    const ValueStrip<const Element*> values(v, value_heads, head, value_size, first_column);
    // M sees no values: its sequence holds no token.
    const i64 end = of_state ? span.end : span.token;
    RecordPipe pipe{reinterpret_cast<float*>(dynamic_shared),
                    records + (span.first_chunk * value_heads + head) * kRecord,
                    static_cast<i64>(value_heads) * kRecord, span.chunks};
    pipe.start();
    StripRows coming = values.load(span.token, end);
    for (int chunk = 0; chunk < span.chunks; ++chunk) {
        const float* record = pipe.next(chunk);
        const StripRows now = coming;
        coming = values.load(span.token + static_cast<i64>(chunk + 1) * kChunk, end);
        if (first_column < columns) {
            StripRows unused;
            state.advance<false>(record, now, unused);
        }
    }
    state.store((of_state ? reached : transition) + place, columns, key_size, columns - first_column);
}
