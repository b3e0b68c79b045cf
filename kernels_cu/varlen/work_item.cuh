// Work of the chain kernels: pieces (runs of tokens of one sequence) x value heads x column blocks, and a cursor that
// walks the chunks of a block's items as one continuous sequence of chunks, each item's from its last chunk to its first
// where KDA_REVERSED is 1.
#pragma once

#include "common/shape.cuh"
#include "common/types.cuh"

constexpr bool kReversed = KDA_REVERSED != 0;

// What a piece carries from chunk to chunk: the state, or (no values, identity at the start) the transition.
enum class Carried : int { kState = 0, kTransition = 1 };

// Where a state comes from or goes to: a slot of the carried buffer (0 and up), sequence n of the caller's states
// (-1 - n), or nowhere (zeros, not stored).
constexpr int kNowhere = -2147483647 - 1;

// One row of the piece table, written by the host: 32 bytes.
struct alignas(16) Piece {
    i64 first_token;
    int tokens;
    Carried carried;
    int state_in;
    int state_out;
    // Number of the tile (tile/fused/record.cuh) that the piece starts with.
    i64 first_tile;
};
static_assert(sizeof(Piece) == 32);

// All items of a launch; the head is the fastest but for the column block, pieces the slowest. warmup_chunks [slot,HV]
// (kernels/certify_cuts.cu) or null: a piece that ends in a slot and head with a certified warm-up runs from zero over
// the chunks next to the slot only, and its transition is not needed.
struct Work {
    const Piece* pieces;
    const int* warmup_chunks;
    int items;
    int key_heads;
    int value_heads;
    int splits;
};

struct Cursor {
    int item;
    int chunk;   // within the item
    int chunks;  // of the item
    Piece piece;
    int key_head;
    int head;
    int split;

    __device__ bool done(const Work& work) const { return item >= work.items; }

    __device__ void open(const Work& work) {
        if (done(work)) return;
        const unsigned lane_of_work = static_cast<unsigned>(item) / static_cast<unsigned>(work.splits);
        split = item - static_cast<int>(lane_of_work) * work.splits;
        const unsigned row = lane_of_work / static_cast<unsigned>(work.value_heads);
        head = static_cast<int>(lane_of_work - row * work.value_heads);
        key_head = head / (work.value_heads / work.key_heads);
        piece = work.pieces[row];
        chunks = (piece.tokens + kChunk - 1) / kChunk;
        if (work.warmup_chunks != nullptr && piece.state_out >= 0) shorten(work);
    }

    __device__ void shorten(const Work& work) {
        const int wanted = work.warmup_chunks[static_cast<i64>(piece.state_out) * work.value_heads + head];
        if (wanted < 0) return;
        if (piece.carried == Carried::kTransition) {
            piece.tokens = 0;
            chunks = 0;
            piece.state_out = kNowhere;
        } else if (wanted < chunks) {
            if constexpr (kReversed) {
                piece.tokens = wanted * kChunk;
            } else {
                const int dropped = (chunks - wanted) * kChunk;
                piece.first_token += dropped;
                piece.tokens -= dropped;
            }
            piece.state_in = kNowhere;
            chunks = wanted;
        }
    }

    // Goes on by some chunks, over the block's later items where its own has too few left; done at the end of all.
    __device__ void advance(const Work& work, int by) {
        chunk += by;
        while (!done(work) && chunk >= chunks) {
            chunk -= chunks;
            item += gridDim.x;
            open(work);
        }
    }

    __device__ static Cursor at_start(const Work& work) {
        Cursor cursor;
        cursor.item = blockIdx.x;
        cursor.chunk = 0;
        cursor.open(work);
        return cursor;
    }

    // Number of the current chunk within the piece.
    __device__ int chunk_of_piece() const { return kReversed ? chunks - 1 - chunk : chunk; }

    __device__ i64 token() const { return piece.first_token + static_cast<i64>(chunk_of_piece()) * kChunk; }

    // Tokens of the current chunk, 1 to kChunk.
    __device__ int length() const {
        const int left = piece.tokens - chunk_of_piece() * kChunk;
        return left < kChunk ? left : kChunk;
    }
};

// A place in a ring of kSlots buffers, and the parity of its current use.
template <int kSlots>
struct RingPlace {
    int slot;
    u32 parity;

    __device__ void advance(int by) {
        slot += by;
        if (slot >= kSlots) {
            slot -= kSlots;
            parity ^= 1;
        }
    }
};
