// Where a chunk of the padded chunk numbering lies. Chunks are numbered through all sequences in order; each sequence
// starts a new chunk, so only its last one may be short, and an empty sequence has none.
#pragma once

#include "common/shape.cuh"
#include "common/types.cuh"

struct ChunkPlace {
    i64 token;   // first token
    int length;  // tokens, 1 to kChunk
    int sequence;
};

// chunk_offsets [sequences + 1]: number of the first chunk of each sequence; cu_seqlens [sequences + 1]: tokens.
__device__ inline ChunkPlace place_chunk(i64 chunk, const i64* chunk_offsets, const i64* cu_seqlens, int sequences) {
    int low = 0, high = sequences;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (chunk_offsets[middle] <= chunk) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const i64 token = cu_seqlens[low] + kChunk * (chunk - chunk_offsets[low]);
    const i64 left = cu_seqlens[low + 1] - token;
    return {token, static_cast<int>(left < kChunk ? left : kChunk), low};
}
