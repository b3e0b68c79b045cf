// What a block of sm90_gradients.cu has in shared memory for its tile of 32 tokens of one head, and how it gets there.
#pragma once

#include "common/gate.cuh"
#include "common/power.cuh"
#include "common/shape.cuh"
#include "common/warp.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "tile/fused/gate.cuh"
#include "tile/fused/record.cuh"
#include "tile/shared/norm.cuh"
#include "tile/shared/swizzled_tile.cuh"

constexpr int kTileTokens = kTileChunks * kChunk;
constexpr int kThreads = 256;

// Tokens lie in swizzled tiles [chunk][half of the channels], records as in global memory.
struct Tile {
    static constexpr int kChunkBytes = 2 * SwizzledTile::kBytes;
    static constexpr int kTokenBytes = kTileChunks * kChunkBytes;
    static constexpr int kState = 0;
    static constexpr int kStateGradient = kState + 4 * Record::kStateWords;
    static constexpr int kKey = kStateGradient + 4 * Record::kStateWords;
    static constexpr int kQuery = kKey + kTokenBytes;
    static constexpr int kGate = kQuery + kTokenBytes;
    static constexpr int kOut = kGate + kTokenBytes;
    static constexpr int kWrites = kOut + kTokenBytes;
    static constexpr int kX = kWrites + 4 * Record::kTokenWords;
    static constexpr int kNorms = kX + 4 * Record::kTokenWords;  // reciprocal, of keys, then of queries
    static constexpr int kDiagonals = kNorms + 2 * kTileTokens * 4;   // of dP, then of X U^T
    static constexpr int kStrengths = kDiagonals + 2 * kTileTokens * 4;  // beta, 0 for missing tokens
    static constexpr int kFactors = kStrengths + kTileTokens * 4;
    static constexpr int kBarriers = kFactors + 10 * Record::kUnits * 4;  // token records, state records
    static constexpr int kBytes = kBarriers + 2 * 8;
    // Once the states have been used: 8 x 8 blocks of dP and dG (gradient_pairs.cuh) and, where those were, sums over the
    // channels; the same sums by warp; twice 16 values a thread that wait for their use.
    static constexpr int kPairs = kState;
    static constexpr int kSums = kPairs;
    static constexpr int kPartialSums = kPairs + 4 * 16 * 64 * 4;
    static constexpr int kParked = kPartialSums + 8 * 2 * kTileTokens * 4;
    static constexpr int kParkedDecays = kParked + kThreads * 16 * 4;
    static_assert(kParkedDecays + kThreads * 16 * 4 <= kKey);
};
static_assert(Tile::kBytes == KDA_SHARED_BYTES, "the launch table must know");

// Rows of the factors, by 16 value columns: reciprocal units, but for dO's own.
enum Factor : int {
    kOfState = 0,
    kOfWrites = 1,  // U, by chunk
    kOfStateGradient = 3,
    kOfX = 4,  // X, by chunk
    kOfOut = 6,     // dO, by chunk
    kOutUnit = 8,   // by chunk
};

// One row of the tile table, written by the host: 16 bytes.
struct TilePlace {
    i64 token;
    int tokens;  // 1 to kTileTokens
    int unused;
};
static_assert(sizeof(TilePlace) == 16);

// dO's unit, one for a chunk, brings its largest magnitude near 2^7.
__device__ float unit_for(float largest) {
    return power_of_two(max(-100, min(100, 7 - exponent_of(largest))));
}

// The factors of the tile, by the block's first threads. Those of a chunk that is missing are 1.
__device__ void load_factors(float* factors, const float* forward_units, const float* backward_units, int tokens) {
    const int row = threadIdx.x / Record::kUnits, block = threadIdx.x % Record::kUnits;
    if (row >= 8) return;
    const auto reciprocal = [&](const float* units, int unit_row) {
        return reciprocal_of_power(units[unit_row * Record::kUnits + block]);
    };
    const auto present = [&](int chunk) { return chunk * kChunk < tokens; };
    float x = 1.0f;
    if (row == kOfState) {
        x = reciprocal(forward_units, Record::kStateUnit);
    } else if (row < kOfStateGradient) {
        if (present(row - kOfWrites)) x = reciprocal(forward_units, Record::kTokenUnit + row - kOfWrites);
    } else if (row == kOfStateGradient) {
        x = reciprocal(backward_units, Record::kStateUnit);
    } else if (row < kOfOut) {
        if (present(row - kOfX)) x = reciprocal(backward_units, Record::kTokenUnit + row - kOfX);
    } else if (present(row - kOfOut)) {
        const int chunk = row - kOfOut;
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < Record::kUnits; ++i) {
            largest = fmaxf(largest, backward_units[(Record::kLargestOut + chunk) * Record::kUnits + i]);
        }
        const float unit = unit_for(largest);
        factors[(kOutUnit + chunk) * Record::kUnits + block] = unit;
        x = reciprocal_of_power(unit);
    } else {
        factors[(kOutUnit + row - kOfOut) * Record::kUnits + block] = 1.0f;
    }
    factors[row * Record::kUnits + block] = x;
}

// first: the tile's first token of the head, rows `stride` elements apart; missing tokens become zeros.
__device__ void load_tokens(u32 tile, const Element* first, i64 stride, int tokens) {
#pragma unroll
    for (int i = 0; i < kTileTokens * 16 / kThreads; ++i) {
        const int row = (threadIdx.x + i * kThreads) / 16, piece = threadIdx.x % 16;
        cp_async_or_zero(tile + row / 16 * Tile::kChunkBytes + piece / 8 * SwizzledTile::kBytes +
                             SwizzledTile::piece(row % 16, piece % 8),
                         first + row * stride + 8 * piece, row < tokens);
    }
}

// The records of the two chains for one tile and head, as they lie in global memory.
struct TileRecords {
    const u32* states;
    const u32* writes;
    const u32* d_states;
    const u32* x;

    __device__ TileRecords(const u32* all_states, const u32* tokens, const u32* all_d_states, const u32* d_tokens,
                           i64 tile_and_head)
        : states(all_states + tile_and_head * Record::kStateWords),
          writes(tokens + tile_and_head * Record::kTokenWords),
          d_states(all_d_states + tile_and_head * Record::kStateWords),
          x(d_tokens + tile_and_head * Record::kTokenWords) {}
};

// By one thread; the token records and the state records have a barrier each.
__device__ void load_records(u32 shared, const TileRecords& from) {
    const u32 barriers = shared + Tile::kBarriers;
    mbarrier_init(barriers, 1);
    mbarrier_init(barriers + 8, 1);
    fence_barriers_for_cluster();
    mbarrier_arrive_expecting(barriers, 2 * 4 * Record::kTokenWords);
    bulk_copy(shared + Tile::kWrites, from.writes, 4 * Record::kTokenWords, barriers);
    bulk_copy(shared + Tile::kX, from.x, 4 * Record::kTokenWords, barriers);
    mbarrier_arrive_expecting(barriers + 8, 2 * 4 * Record::kStateWords);
    bulk_copy(shared + Tile::kState, from.states, 4 * Record::kStateWords, barriers + 8);
    bulk_copy(shared + Tile::kStateGradient, from.d_states, 4 * Record::kStateWords, barriers + 8);
}

// Which: 0 for the token records, 1 for the state records.
__device__ void wait_for_records(u32 shared, int which) {
    while (!mbarrier_try_wait(shared + Tile::kBarriers + 8 * which, 0)) {
    }
}

// Zeros for a second chunk that is missing.
__device__ void clear_missing_chunk(unsigned char* memory, int tokens) {
    if (tokens > kChunk) return;
    for (int i = threadIdx.x; i < 2 * 4 * Record::kTokenWords / 16; i += kThreads) {
        if (i / 8 % Record::kTokenBlocks >= 2) {
            reinterpret_cast<uint4*>(memory + Tile::kWrites)[i] = make_uint4(0, 0, 0, 0);
        }
    }
}

// The reciprocal norms of all keys and queries, four tokens a warp.
__device__ void find_norms(const unsigned char* memory, float* norms) {
    const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
    const auto square = [&](int tile, float factor) {
        float sum = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 x = *reinterpret_cast<const uint4*>(memory + tile + row / 16 * Tile::kChunkBytes +
                                                            half * SwizzledTile::kBytes +
                                                            SwizzledTile::piece(row % 16, piece));
            const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2 y = Pair::unpack(pairs[i]);
                y.x *= factor, y.y *= factor;
                sum = fmaf(y.x, y.x, fmaf(y.y, y.y, sum));
            }
        }
#pragma unroll
        for (int distance = 1; distance < 8; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
        return sum;
    };
    const auto reciprocal = [&](int tile) {
        const float sum = square(tile, 1.0f);
        if (!__any_sync(kAllLanes, squares_overflow(sum))) return reciprocal_norm(sum);
        const float of_large = kShrink * reciprocal_norm_of_shrunk(square(tile, kShrink));
        return squares_overflow(sum) ? of_large : reciprocal_norm(sum);
    };
    const float key = reciprocal(Tile::kKey), query = reciprocal(Tile::kQuery);
    if (piece == 0) {
        norms[row] = key;
        norms[kTileTokens + row] = query;
    }
}

// dO to float16 in its units, in place; a thread has 16 value columns of a token.
__device__ void convert_out(unsigned char* memory, const float* factors) {
    const int row = threadIdx.x / 8, block = threadIdx.x % 8;
    const float unit = factors[(kOutUnit + row / kChunk) * Record::kUnits + block];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint4* at = reinterpret_cast<uint4*>(memory + Tile::kOut + row / 16 * Tile::kChunkBytes +
                                             block / 4 * SwizzledTile::kBytes +
                                             SwizzledTile::piece(row % 16, 2 * (block % 4) + i));
        const auto converted = [&](u32 x) {
            const float2 y = Pair::unpack(x);
            return pack_f16(unit * y.x, unit * y.y);
        };
        const uint4 x = *at;
        *at = make_uint4(converted(x.x), converted(x.y), converted(x.z), converted(x.w));
    }
}

// A missing token's gates, two at a time, which decay nothing.
__device__ void fill_gates(unsigned char* memory, int tokens, u32 missing) {
    for (int i = threadIdx.x; i < (kTileTokens - tokens) * 16; i += kThreads) {
        const int row = tokens + i / 16, piece = i % 16;
        *reinterpret_cast<uint4*>(memory + Tile::kGate + row / 16 * Tile::kChunkBytes +
                                  piece / 8 * SwizzledTile::kBytes + SwizzledTile::piece(row % 16, piece % 8)) =
            make_uint4(missing, missing, missing, missing);
    }
}

// Sends a tile of tokens to global memory, laid out like the inputs.
__device__ void store_tokens(const unsigned char* tile, Element* first, i64 stride, int tokens) {
#pragma unroll
    for (int i = 0; i < kTileTokens * 16 / kThreads; ++i) {
        const int row = (threadIdx.x + i * kThreads) / 16, piece = threadIdx.x % 16;
        if (row < tokens) {
            *reinterpret_cast<uint4*>(first + row * stride + 8 * piece) = *reinterpret_cast<const uint4*>(
                tile + row / 16 * Tile::kChunkBytes + piece / 8 * SwizzledTile::kBytes +
                SwizzledTile::piece(row % 16, piece % 8));
        }
    }
}
