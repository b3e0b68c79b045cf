// Spans: runs of consecutive chunks of one sequence, the unit that one chain of the recurrence works through. An
// unsplit sequence is one span; a long one may be cut into several.
#pragma once

#include "common/shape.cuh"
#include "common/types.cuh"

struct Span {
    i64 first_chunk;
    int chunks;
    int sequence;
    i64 token;  // first token
    i64 end;    // where the sequence's tokens end, not the span's
    bool last;  // the sequence ends with this span
};

// span_chunks [2, spans]: first chunk of each span, then the chunk behind its last; span_sequences [spans].
__device__ inline Span place_span(int span, int spans, const i64* span_chunks, const int* span_sequences,
                                  const i64* chunk_offsets, const i64* cu_seqlens) {
    const i64 first = span_chunks[span], behind = span_chunks[spans + span];
    const int sequence = span_sequences[span];
    return {first,
            static_cast<int>(behind - first),
            sequence,
            cu_seqlens[sequence] + kChunk * (first - chunk_offsets[sequence]),
            cu_seqlens[sequence + 1],
            behind == chunk_offsets[sequence + 1]};
}
