// All gradients of the tokens of a tile of 32 (two chunks), from what the two chains left: for what sm90_chain.cu takes.
//
//   with S before, dS' behind the tile:
//   dV = Diag(beta) X,  dQ+ = scale dO S^T,  dK+ = -dV S^T,  dKr = U dS'^T,  d total = rowsum(S * dS')
//   dP = tril(scale dO U^T),  dG = -tril(dV U^T, -1),  dbeta_i = X_i . U_i / beta_i
//   dq^_i = e^gamma_i dQ+_i + sum_j dP_ij e^(gamma_i - gamma_j) k^_j,  and so on for k^ as row and as column
//   dgamma = q^ * dq^ + k^ * (its row part - its column part),  then through gate, beta and norm
//
// gamma counts from the tile's start. Within a chunk, decays are factors around its middle: e^(gamma - m) and
// e^(m - gamma) with m half the chunk's total, at most 40 nats either way. Between the chunks a channel has the factor
// e^(m0 + m1). Pairs i = j reach q and k only. The log decays get products of the very operands that the tensor cores saw
// with what they returned, so that a pair that does not span a token cancels there. KDA_BOUNDED 0 (tile/fused/gate.cuh):
// a warp in whose channels a decay is too strong for all that takes its pairs level by level (tile/fused/gradient_deep.cuh).
//
// KDA_GROUPED 1: with more value heads than key heads, of which each has as many; the shares of dq and dk by value head
// are then left in float32.
//
// In:  q, k [T,H,128], g, d_out [T,HV,128], beta [T,HV] of one 16-bit type, 16-byte aligned; A_log [HV], dt_bias
//      [HV,128] float32 or null; the records (tile/fused/record.cuh) of sm90_chain (states, tokens, units) and of
//      sm90_backward_chain (d_states, d_tokens, d_units); tiles: the tile table.
// Out: dv, dg [T,HV,128], dbeta [T,HV] of the inputs' type; dq, dk [T,H,128] of that type or, if KDA_GROUPED is 1,
//      [T,HV,128] float32; d_bias [tiles,HV,128], d_rate [tiles,HV,8] float32: the tile's sums of the gradients of
//      dt_bias and, by 16 channels, of A_log. Written.
// Grid: one block per tile and head, the head fastest; kThreads threads, Tile::kBytes of dynamic shared memory. A warp
// has 16 channels and all tokens. Sums run in a fixed order.
#include "common/warp.cuh"
#include "ptx/matrix.cuh"
#include "ptx/registers.cuh"
#include "tile/fused/gradient_deep.cuh"
#include "tile/fused/gradient_pairs.cuh"
#include "tile/fused/gradient_strong.cuh"
#include "tile/fused/gradient_tile.cuh"

namespace {

constexpr bool kGrouped = KDA_GROUPED != 0;

// A lane's ldmatrix address in a token record, for value columns 16 step on and 16 tokens of a chunk: matrices (value
// columns 0-7, tokens 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
__device__ u32 token_blocks(u32 record, int step, int chunk, int lane) {
    const int matrix = lane >> 3;
    const int block = (2 * step + (matrix & 1)) * Record::kTokenBlocks + 2 * chunk + (matrix >> 1);
    return record + (block * 8 + (lane & 7)) * 16;
}

// The same in a state record for 16 channels: (value columns 0-7, channels 0-7), (0-7, 8-15), (8-15, 0-7), (8-15,
// 8-15).
__device__ u32 state_blocks(u32 record, int step, int channels, int lane) {
    const int matrix = lane >> 3;
    const int block = (2 * step + (matrix >> 1)) * Record::kBlocks + 2 * channels + (matrix & 1);
    return record + (block * 8 + (lane & 7)) * 16;
}

// Element (token 8 n + 2t + e, channel g or g + 8) of the lane's packed columns of a chunk, as `ldmatrix_transposed`
// gives them: register (n % 2) + 2 (channel / 8).
__device__ void unpack_channels(ChannelTokens& x, const u32 (&packed)[2][4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 y = Pair::unpack(packed[n / 2][n % 2 + 2 * half]);
            x[n][2 * half] = y.x;
            x[n][2 * half + 1] = y.y;
        }
    }
}

__device__ void pack_channels(u32 (&packed)[2][4], const ChannelTokens& x) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            packed[n / 2][n % 2 + 2 * half] = Pair::pack(x[n][2 * half], x[n][2 * half + 1]);
        }
    }
}

// A lane's elements to float32 rows, `stride` apart; to: those of its channel g and the first token.
__device__ void store_channels(float* to, const ChannelTokens& x, i64 stride, int tokens, int lane) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int token = 8 * n + 2 * (lane & 3) + e % 2;
            if (token < tokens) to[token * stride + 8 * (e / 2)] = x[n][e];
        }
    }
}

// The factors of a tile's operands by 16 value columns (`step`). They are mostly alike for all columns: then sums need
// not be brought to a common unit on the way.
struct Factors {
    const float* at;
    bool alike;

    __device__ Factors(const float* factors, int lane) : at(factors) {
        const float first = factors[lane & 24], second = factors[32 + (lane & 24)];
        alike = __all_sync(kAllLanes, factors[lane] == first && factors[32 + lane] == second);
    }

    __device__ float get(int row, int step) const { return at[row * Record::kUnits + step]; }
};

// d += factor A B, or, if kAlike, without the factor.
template <bool kAlike>
__device__ void add_product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float factor) {
    if constexpr (kAlike) {
        mma_f16(d, a, b0, b1);
    } else {
        float part[4] = {};
        mma_f16(part, a, b0, b1);
#pragma unroll
        for (int e = 0; e < 4; ++e) d[e] = fmaf(factor, part[e], d[e]);
    }
}

// One 16 x 16 block of dP (matrix 0) or X U^T (1): token rows of chunk `rows`, columns of chunk `columns`.
template <bool kAlike>
__device__ void multiply_tokens(float (&block)[2][4], u32 shared, const Factors& factors, int matrix, int rows,
                                int columns, int lane) {
    const auto factor = [&](int step) {
        return factors.get((matrix == 0 ? kOfOut : kOfX) + rows, step) * factors.get(kOfWrites + columns, step);
    };
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        u32 a[4], b[4];
        if (matrix == 0) {
            ldmatrix(a, SwizzledTile::step(shared + Tile::kOut + rows * Tile::kChunkBytes +
                                               SwizzledTile::rows_first(lane), step, SwizzledTile::kBytes));
        } else {
            u32 x[4];
            ldmatrix_transposed(x, token_blocks(shared + Tile::kX, step, rows, lane));
            a[0] = x[0], a[1] = x[2], a[2] = x[1], a[3] = x[3];
        }
        ldmatrix_transposed(b, token_blocks(shared + Tile::kWrites, step, columns, lane));
        const float of_step = kAlike ? 1.0f : factor(step);
#pragma unroll
        for (int n = 0; n < 2; ++n) add_product<kAlike>(block[n], a, b[2 * n], b[2 * n + 1], of_step);
    }
    if constexpr (kAlike) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            block[0][e] *= factor(0);
            block[1][e] *= factor(0);
        }
    }
}

// Puts such a block, X U^T as dG = -Diag(beta) X U^T, where the pairs want it; the diagonal, as it is, goes its own way.
__device__ void place_block(const float (&block)[2][4], const PairBlocks& blocks, float* diagonal,
                            const float* strengths, int matrix, int rows, int columns, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const int row = 8 * m + g, column = 8 * n + 2 * t;
            const float sign = matrix == 0 ? 1.0f : -strengths[kChunk * rows + row];
            const float x = block[n][2 * m], y = block[n][2 * m + 1];
            if (rows == columns && (row == column || row == column + 1)) {
                diagonal[kChunk * rows + row] = row == column ? x : y;
            }
            const int last = rows == columns ? row : kChunk;
            blocks.store(matrix, 2 * rows + m, 2 * columns + n, column < last ? rounded_tf32(sign * x) : 0.0f,
                         column + 1 < last ? rounded_tf32(sign * y) : 0.0f, lane);
        }
    }
}

// The products with the states, for a warp's 16 channels.
struct StateProducts {
    ChannelTokens d_query = {}, d_key = {}, d_key_out = {};
    float total[2];  // of channels g and g + 8

    template <bool kAlike>
    __device__ void multiply(u32 shared, const Factors& factors, int warp, int lane) {
        // Products of the state's rows with those of its gradient, 8 channels each; only those of a channel with itself
        // are of use.
        float totals[2][4] = {};
#pragma unroll 1
        for (int step = 0; step < 8; ++step) {
            const auto factor = [&](int row, int of_chunk) {
                return kAlike ? 1.0f : factors.get(row, step) * factors.get(of_chunk, step);
            };
            u32 state[4], gradient[4];
            ldmatrix_transposed(state, state_blocks(shared + Tile::kState, step, warp, lane));
            ldmatrix_transposed(gradient, state_blocks(shared + Tile::kStateGradient, step, warp, lane));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                add_product<kAlike>(totals[half], state, gradient[half], gradient[half + 2],
                                    factor(kOfState, kOfStateGradient));
            }
#pragma unroll
            for (int chunk = 0; chunk < 2; ++chunk) {
                u32 x[4];
                ldmatrix(x, SwizzledTile::step(shared + Tile::kOut + chunk * Tile::kChunkBytes +
                                                   SwizzledTile::rows_first(lane), step, SwizzledTile::kBytes));
                float of_step = factor(kOfState, kOfOut + chunk);
                add_product<kAlike>(d_query[2 * chunk], state, x[0], x[2], of_step);
                add_product<kAlike>(d_query[2 * chunk + 1], state, x[1], x[3], of_step);
                ldmatrix_transposed(x, token_blocks(shared + Tile::kX, step, chunk, lane));
                of_step = -factor(kOfState, kOfX + chunk);
                add_product<kAlike>(d_key[2 * chunk], state, x[0], x[1], of_step);
                add_product<kAlike>(d_key[2 * chunk + 1], state, x[2], x[3], of_step);
                ldmatrix_transposed(x, token_blocks(shared + Tile::kWrites, step, chunk, lane));
                of_step = factor(kOfStateGradient, kOfWrites + chunk);
                add_product<kAlike>(d_key_out[2 * chunk], gradient, x[0], x[1], of_step);
                add_product<kAlike>(d_key_out[2 * chunk + 1], gradient, x[2], x[3], of_step);
            }
        }
        // Channel g's is held by the lane of its row at column g, and likewise for g + 8.
        const int g = lane >> 2, owner = (lane & 28) | (g >> 1);
        total[0] = __shfl_sync(kAllLanes, (g & 1) ? totals[0][1] : totals[0][0], owner);
        total[1] = __shfl_sync(kAllLanes, (g & 1) ? totals[1][3] : totals[1][2], owner);
        if constexpr (kAlike) apply(factors);
    }

    __device__ void apply(const Factors& factors) {
        const float of_state = factors.get(kOfState, 0), of_gradient = factors.get(kOfStateGradient, 0);
        total[0] *= of_state * of_gradient;
        total[1] *= of_state * of_gradient;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float of_query = of_state * factors.get(kOfOut + n / 2, 0);
            const float of_key = -of_state * factors.get(kOfX + n / 2, 0);
            const float of_key_out = of_gradient * factors.get(kOfWrites + n / 2, 0);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                d_query[n][e] *= of_query;
                d_key[n][e] *= of_key;
                d_key_out[n][e] *= of_key_out;
            }
        }
    }
};

// Units of decays up to which the pairs share factors. Of a token: where pairs share factors, the gradient of its log
// decay is the difference of two sums, and at 10 nats e^-10 times their size. It is then right to 3e-3 (a token alone among
// hardly decaying ones; rounding to bfloat16 costs 1.7e-3), at 12 nats to 1.2e-2. Beyond, pairs are taken by levels.
constexpr float kMostOfSharedToken = 10.0f * kLog2E * kGateScale;
// Of a chunk: its halves to either side of the middle.
constexpr float kMostOfSharedChunk = 80.0f * kLog2E * kGateScale;

// Half the log2 decay of a chunk for channels g and g + 8, and e^(gamma - m) of its elements.
struct ChunkDecays {
    float half[2];

    // a: the chunk's gates in units of `unit`.
    __device__ ChunkDecays(ChannelTokens& fall, int first, const u32 (&a)[4], float unit, int lane) {
        const int g = lane >> 2, t = lane & 3;
        // Column i sums tokens 0 to i.
        constexpr u32 kOnes = 0x3c003c00u;
        const u32 triangle = (2 * t <= g ? 0x3c00u : 0u) | (2 * t + 1 <= g ? 0x3c000000u : 0u);
        float early[4] = {}, late[4] = {}, all[4] = {};
        mma_f16(early, a, triangle, 0);
        mma_f16(late, a, kOnes, triangle);
        mma_f16(all, a, kOnes, kOnes);
        half[0] = 0.5f * unit * all[0];
        half[1] = 0.5f * unit * all[2];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            fall[first][e] = ex2_flushed(fmaf(unit, early[e], -half[e / 2]));
            fall[first + 1][e] = ex2_flushed(fmaf(unit, late[e], -half[e / 2]));
        }
    }
};

// Sums over the warp's channels of 16 values a lane, [key or query][8 tokens][token]: 64 sums, left two a lane.
__device__ float2 sum_channels(float (&x)[2][4][2], int lane) {
    float half[4][2], quarter[2][2];
    const bool upper = lane & 16, upper_half = lane & 8, upper_quarter = lane & 4;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float given = __shfl_xor_sync(kAllLanes, upper ? x[0][n][e] : x[1][n][e], 16);
            half[n][e] = (upper ? x[1][n][e] : x[0][n][e]) + given;
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float given = __shfl_xor_sync(kAllLanes, upper_half ? half[n][e] : half[n + 2][e], 8);
            quarter[n][e] = (upper_half ? half[n + 2][e] : half[n][e]) + given;
        }
    }
    float2 sums;
    sums.x = (upper_quarter ? quarter[1][0] : quarter[0][0]) +
             __shfl_xor_sync(kAllLanes, upper_quarter ? quarter[0][0] : quarter[1][0], 4);
    sums.y = (upper_quarter ? quarter[1][1] : quarter[0][1]) +
             __shfl_xor_sync(kAllLanes, upper_quarter ? quarter[0][1] : quarter[1][1], 4);
    return sums;
}

__device__ void copy(ChannelTokens& to, const ChannelTokens& from) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[n][e] = from[n][e];
    }
}

// A thread's values out of its registers for a while.
__device__ void park(float4* place, const ChannelTokens& x) {
#pragma unroll
    for (int n = 0; n < 4; ++n) place[n * kThreads] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
}

__device__ void fetch_parked(ChannelTokens& x, const float4* place) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const float4 y = place[n * kThreads];
        x[n][0] = y.x, x[n][1] = y.y, x[n][2] = y.z, x[n][3] = y.w;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sm90_gradients(const Element* q, const Element* k, const Element* g, const Element* beta, const float* A_log,
                   const float* dt_bias, const Element* d_out, const u32* states, const u32* tokens, const float* units,
                   const u32* d_states, const u32* d_tokens, const float* d_units, const TilePlace* tiles,
                   int key_heads, int value_heads, int gate_form, int beta_form, float lower_bound, float scale,
                   void* dq, void* dk, Element* dv, Element* dg, Element* dbeta, float* d_bias, float* d_rate) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = static_cast<u32>(__cvta_generic_to_shared(memory));
    float* norms = reinterpret_cast<float*>(memory + Tile::kNorms);
    float* diagonals = reinterpret_cast<float*>(memory + Tile::kDiagonals);
    float* strengths = reinterpret_cast<float*>(memory + Tile::kStrengths);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane & 3;
    const int head = blockIdx.x % value_heads;
    const i64 tile_and_head = blockIdx.x;
    const TilePlace place = tiles[blockIdx.x / value_heads];
    const i64 offset = (place.token * value_heads + head) * kSize, stride = static_cast<i64>(value_heads) * kSize;
    const int key_head = kGrouped ? head / (value_heads / key_heads) : head;
    const i64 key_stride = kGrouped ? static_cast<i64>(key_heads) * kSize : stride;
    const i64 key_offset = kGrouped ? place.token * key_stride + key_head * kSize : offset;

    // Asked for early: of channels g and g + 8 of the warp's 16.
    const int channel = 16 * warp + (lane >> 2);
    const float A = A_log != nullptr ? expf(A_log[head]) : 1.0f;
    const Gates gates(static_cast<GateForm>(gate_form), A, lower_bound);
    float bias[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        bias[half] = dt_bias != nullptr ? dt_bias[head * kSize + channel + 8 * half] : 0.0f;
    }

    if (threadIdx.x == 0) load_records(shared, TileRecords(states, tokens, d_states, d_tokens, tile_and_head));
    load_tokens(shared + Tile::kKey, k + key_offset, key_stride, place.tokens);
    load_tokens(shared + Tile::kQuery, q + key_offset, key_stride, place.tokens);
    load_tokens(shared + Tile::kOut, d_out + offset, stride, place.tokens);
    load_tokens(shared + Tile::kGate, g + offset, stride, place.tokens);
    cp_async_commit();
    load_factors(reinterpret_cast<float*>(memory + Tile::kFactors), units + tile_and_head * Record::kForwardUnits,
                 d_units + tile_and_head * Record::kBackwardUnits, place.tokens);
    const i64 of_beta = (place.token + threadIdx.x) * value_heads + head;
    const Strength strength(static_cast<BetaForm>(beta_form));
    if (threadIdx.x < kTileTokens) {
        strengths[threadIdx.x] = threadIdx.x < place.tokens ? strength.of(beta[of_beta]) : 0.0f;
    }
    cp_async_wait<0>();
    __syncthreads();

    const Factors factors(reinterpret_cast<const float*>(memory + Tile::kFactors), lane);
    find_norms(memory, norms);
    convert_out(memory, factors.at);
    fill_gates(memory, place.tokens, gates.missing());
    wait_for_records(shared, 0);
    clear_missing_chunk(memory, place.tokens);
    __syncthreads();

    // Six warps have a block of dP or dG each; it waits in registers until the states are no longer needed.
    const int matrix = warp / 3, rows = warp % 3 != 0, columns = warp % 3 == 2;
    float block[2][4] = {};
    if (warp < 6) {
        if (factors.alike) {
            multiply_tokens<true>(block, shared, factors, matrix, rows, columns, lane);
        } else {
            multiply_tokens<false>(block, shared, factors, matrix, rows, columns, lane);
        }
    }
    wait_for_records(shared, 1);
    StateProducts products;
    if (factors.alike) {
        products.multiply<true>(shared, factors, warp, lane);
    } else {
        products.multiply<false>(shared, factors, warp, lane);
    }
    __syncthreads();

    const PairBlocks blocks = {reinterpret_cast<float*>(memory + Tile::kPairs)};
    if (warp < 6) place_block(block, blocks, diagonals + matrix * kTileTokens, strengths, matrix, rows, columns, lane);
    const u32 own_columns = SwizzledTile::step(SwizzledTile::rows_first(lane), warp, SwizzledTile::kBytes);
    // The warp's 16 channels of all tokens.
    const auto fetch = [&](u32 (&packed)[2][4], int tile) {
        ldmatrix_transposed(packed[0], shared + tile + own_columns);
        ldmatrix_transposed(packed[1], shared + tile + Tile::kChunkBytes + own_columns);
    };
    const float scaled_bias[2] = {gates.rate * bias[0], gates.rate * bias[1]};
    // The warp's gates of a chunk in units, as rows of channels.
    const auto fetch_units = [&](u32 (&units)[4], int chunk) {
        u32 raw[4];
        ldmatrix_transposed(raw, shared + Tile::kGate + chunk * Tile::kChunkBytes + own_columns);
        units[0] = gates.pair(raw[0], scaled_bias[0]), units[1] = gates.pair(raw[2], scaled_bias[1]);
        units[2] = gates.pair(raw[1], scaled_bias[0]), units[3] = gates.pair(raw[3], scaled_bias[1]);
    };
    // Whether a token may decay by more than shared factors take, told from its raw gate.
    bool risky = false;
    if constexpr (!kBounded) {
        u32 raw[2][4];
        fetch(raw, Tile::kGate);
        risky = __any_sync(kAllLanes, gates.decays_beyond(raw, scaled_bias, kMostOfSharedToken));
    }
    __syncthreads();

    // dV of 16 value columns a warp, where dO was.
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
        u32 x[4];
        ldmatrix_transposed(x, token_blocks(shared + Tile::kX, warp, chunk, lane));
        const float* of_chunk = strengths + kChunk * chunk + (lane >> 2);
        const float factor = factors.get(kOfX + chunk, warp);
        const float early_token = factor * of_chunk[0], late_token = factor * of_chunk[8];
        const auto converted = [&](u32 y, float beta) {
            const float2 z = HalfPair<Float16>::unpack(y);
            return Pair::pack(beta * z.x, beta * z.y);
        };
        const u32 ordered[4] = {converted(x[0], early_token), converted(x[2], late_token), converted(x[1], early_token),
                                converted(x[3], late_token)};
        stmatrix(shared + Tile::kOut + chunk * Tile::kChunkBytes + own_columns, ordered);
    }

    const auto normed = [&](ChannelTokens& x, int tile, const float* norm) {
        u32 packed[2][4];
        fetch(packed, tile);
        unpack_channels(x, packed);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float2 r = reinterpret_cast<const float2*>(norm)[4 * n + t];
            x[n][0] *= r.x, x[n][2] *= r.x;
            x[n][1] *= r.y, x[n][3] *= r.y;
        }
    };

    // Of the warp's channels, for what has no shared factors.
    const auto fill = [&](DeepTile& tile) {
        tile.unit = gates.unit;
        fetch_units(tile.units[0], 0);
        fetch_units(tile.units[1], 1);
        normed(tile.key, Tile::kKey, norms);
        normed(tile.query, Tile::kQuery, norms + kTileTokens);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) tile.query[n][e] *= scale;
        }
    };

    ChannelTokens key, x, of_decay;
    float4* parked = reinterpret_cast<float4*>(memory + Tile::kParked) + threadIdx.x;
    float4* parked_decays = reinterpret_cast<float4*>(memory + Tile::kParkedDecays) + threadIdx.x;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const float2 strength = reinterpret_cast<const float2*>(strengths)[4 * n + t];
#pragma unroll
        for (int e = 0; e < 4; ++e) products.d_key[n][e] *= e % 2 == 0 ? strength.x : strength.y;
    }
    // The strong tokens' own sums, put by; then what all tokens take.
    StrongTokens strong;
    if (!kBounded && risky) {
        DeepTile tile;
        fill(tile);
        strong = StrongTokens::of(tile.units, kMostOfSharedToken, lane);
        if (!strong.many()) {
            // Copies: what a call is given by reference has no registers elsewhere either.
            ChannelTokens d_query, d_key, d_key_out, of_strong;
            const float of_state[2] = {products.total[0], products.total[1]};
            copy(d_query, products.d_query);
            copy(d_key, products.d_key);
            copy(d_key_out, products.d_key_out);
            strong.take(tile, d_query, d_key, d_key_out, of_state, of_strong, blocks, lane);
            park(parked_decays, of_strong);
            // Over a call they would have no registers.
            copy(products.d_query, d_query);
            copy(products.d_key, d_key);
            copy(products.d_key_out, d_key_out);
            products.total[0] = of_state[0], products.total[1] = of_state[1];
        }
    }

    ChannelTokens fall;
    float early[2], late[2];
    bool deep = !kBounded && strong.many();
    {
        u32 units[4];
        fetch_units(units, 0);
        const ChunkDecays first(fall, 0, units, gates.unit, lane);
        fetch_units(units, 1);
        const ChunkDecays second(fall, 2, units, gates.unit, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            early[half] = ex2_flushed(first.half[half]);
            late[half] = ex2_flushed(second.half[half]);
        }
        // Of a channel of the warp, in either chunk.
        const float deepest = fminf(fminf(first.half[0], first.half[1]), fminf(second.half[0], second.half[1]));
        if constexpr (!kBounded) {
            deep = __any_sync(kAllLanes, deep || 2.0f * deepest < gates.unit * kMostOfSharedChunk);
        }
    }
    if (!kBounded && deep) {
        DeepTile tile;
        fill(tile);
        ChannelTokens d_query, d_key, d_key_out, d_decay;
        const float of_state[2] = {products.total[0], products.total[1]};
        copy(d_query, products.d_query);
        copy(d_key, products.d_key);
        copy(d_key_out, products.d_key_out);
        tile.take(d_query, d_key, d_key_out, of_state, d_decay, blocks, lane);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            // A token with itself.
            const float2 own = reinterpret_cast<const float2*>(diagonals)[4 * n + t];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float diagonal = e % 2 == 0 ? own.x : own.y;
                products.d_query[n][e] = fmaf(diagonal, tile.key[n][e], d_query[n][e]);
                products.d_key[n][e] = fmaf(diagonal, tile.query[n][e], d_key[n][e]);
                of_decay[n][e] = d_decay[n][e];
            }
        }
        park(parked, products.d_query);
    } else {
        const float across[2] = {early[0] * late[0], early[1] * late[1]};
        // Rows: what is still missing from dQ+ and dK+ is e^(gamma - m) and, in the second chunk, `across`.
        normed(key, Tile::kKey, norms);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                x[n][e] = rounded_tf32(key[n][e] * rcp(fall[n][e]));
                products.d_query[n][e] *= early[e / 2];
                products.d_key[n][e] *= early[e / 2];
                products.d_key_out[n][e] *= n < 2 ? across[e / 2] * late[e / 2] : late[e / 2];
            }
        }
        // All that is written to the state behind the tile.
        float more[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                sum = fmaf(x[n][2 * half], products.d_key_out[n][2 * half], sum);
                sum = fmaf(x[n][2 * half + 1], products.d_key_out[n][2 * half + 1], sum);
            }
            sum += __shfl_xor_sync(kAllLanes, sum, 1);
            sum += __shfl_xor_sync(kAllLanes, sum, 2);
            more[half] = fmaf(across[half] * across[half], products.total[half], sum);
        }
        park(parked, products.d_key_out);
        add_rows(products.d_query, x, blocks, 0, across, lane);
        add_rows(products.d_key, x, blocks, 1, across, lane);

        // What rows give the log decays; then columns. between: the second chunk's part of the first's, without `across`.
        float between[2][4] = {};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                of_decay[n][e] = rounded_tf32(key[n][e] * fall[n][e]) * products.d_key[n][e];
                products.d_key[n][e] *= fall[n][e];
            }
        }
        {
            ChannelTokens query;
            normed(query, Tile::kQuery, norms + kTileTokens);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                // A token with itself.
                const float2 own = reinterpret_cast<const float2*>(diagonals)[4 * n + t];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float scaled = scale * query[n][e], diagonal = e % 2 == 0 ? own.x : own.y;
                    x[n][e] = rounded_tf32(scaled * fall[n][e]);
                    of_decay[n][e] = fmaf(x[n][e], products.d_query[n][e], of_decay[n][e]);
                    products.d_query[n][e] = fmaf(fall[n][e], products.d_query[n][e], diagonal * key[n][e]);
                    products.d_key[n][e] = fmaf(diagonal, scaled, products.d_key[n][e]);
                }
            }
        }
        fetch_parked(products.d_key_out, parked);
        park(parked, products.d_query);
        add_columns(products.d_key_out, between, x, blocks, 0, lane);
        normed(key, Tile::kKey, norms);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                hold(fall[n][e]);
                x[n][e] = rounded_tf32(key[n][e] * fall[n][e]);
            }
        }
        add_columns(products.d_key_out, between, x, blocks, 1, lane);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float column = products.d_key_out[n][e];
                if (n < 2) column = fmaf(across[e / 2], between[n][e], column);
                const float rise = rcp(fall[n][e]);
                of_decay[n][e] = fmaf(-rounded_tf32(key[n][e] * rise), column, of_decay[n][e]);
                products.d_key[n][e] = fmaf(rise, column, products.d_key[n][e]);
            }
        }
        // From the gradients by gamma to those of the log decays.
        sum_from_token(of_decay, kTileTokens, lane);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) of_decay[n][e] += more[e / 2];
        }
        if (!kBounded && strong.any()) {
            ChannelTokens exact;
            fetch_parked(exact, parked_decays);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (strong.has(8 * n + 2 * t + e % 2)) of_decay[n][e] = exact[n][e];
                }
            }
        }
    }

    // Through the gate.
    {
        u32 raw[2][4];
        fetch(raw, Tile::kGate);
        unpack_channels(x, raw);
        const GateAdjoint adjoint(A, lower_bound);
        float of_bias[2] = {}, of_rate = 0.0f;
        if (gates.is_log) {
            copy(x, of_decay);
        } else {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float argument = fmaf(x[n][e], gates.rate, scaled_bias[e / 2]);
                    const GateGradient one = adjoint.take(of_decay[n][e], argument);
                    of_bias[e / 2] += one.raw;
                    of_rate += one.rate;
                    x[n][e] = one.raw;
                }
            }
        }
        pack_channels(raw, x);
        stmatrix_transposed(shared + Tile::kGate + own_columns, raw[0]);
        stmatrix_transposed(shared + Tile::kGate + Tile::kChunkBytes + own_columns, raw[1]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            of_bias[half] += __shfl_xor_sync(kAllLanes, of_bias[half], 1);
            of_bias[half] += __shfl_xor_sync(kAllLanes, of_bias[half], 2);
            if (t == 0) d_bias[tile_and_head * kSize + channel + 8 * half] = of_bias[half];
        }
        of_rate = warp_sum(of_rate);
        if (lane == 0) d_rate[tile_and_head * 8 + warp] = of_rate;
    }

    // Through the norm.
    ChannelTokens query;
    normed(key, Tile::kKey, norms);
    normed(query, Tile::kQuery, norms + kTileTokens);
    fetch_parked(products.d_query, parked);
    float along[2][4][2];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            along[0][n][e] = fmaf(key[n][e], products.d_key[n][e], key[n][2 + e] * products.d_key[n][2 + e]);
            along[1][n][e] = fmaf(query[n][e], products.d_query[n][e], query[n][2 + e] * products.d_query[n][2 + e]);
        }
    }
    const float2 sums = sum_channels(along, lane);
    float* partial = reinterpret_cast<float*>(memory + Tile::kPartialSums);
    reinterpret_cast<float2*>(partial)[(2 * warp + (lane >> 4)) * (kTileTokens / 2) + 4 * (lane >> 2 & 3) + t] = sums;
    __syncthreads();
    float* along_rows = reinterpret_cast<float*>(memory + Tile::kSums);
    if (threadIdx.x < 2 * kTileTokens) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += partial[i * 2 * kTileTokens + threadIdx.x];
        along_rows[threadIdx.x] = sum;
    }
    __syncthreads();
    const auto through_norm = [&](ChannelTokens& d, const ChannelTokens& x, int kind, float factor, int tile,
                                  void* shares) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float2 r = reinterpret_cast<const float2*>(norms + kind * kTileTokens)[4 * n + t];
            const float2 along = reinterpret_cast<const float2*>(along_rows + kind * kTileTokens)[4 * n + t];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float norm = e % 2 == 0 ? r.x : r.y, sum = e % 2 == 0 ? along.x : along.y;
                d[n][e] = norm * factor * (d[n][e] - x[n][e] * sum);
            }
        }
        if constexpr (kGrouped) {
            store_channels(static_cast<float*>(shares) + offset + channel, d, stride, place.tokens, lane);
        } else {
            u32 packed[2][4];
            pack_channels(packed, d);
            stmatrix_transposed(shared + tile + own_columns, packed[0]);
            stmatrix_transposed(shared + tile + Tile::kChunkBytes + own_columns, packed[1]);
        }
    };
    through_norm(products.d_key, key, 0, 1.0f, Tile::kKey, dk);
    through_norm(products.d_query, query, 1, scale, Tile::kQuery, dq);
    __syncthreads();

    if constexpr (!kGrouped) {
        store_tokens(memory + Tile::kKey, static_cast<Element*>(dk) + offset, stride, place.tokens);
        store_tokens(memory + Tile::kQuery, static_cast<Element*>(dq) + offset, stride, place.tokens);
    }
    store_tokens(memory + Tile::kGate, dg + offset, stride, place.tokens);
    store_tokens(memory + Tile::kOut, dv + offset, stride, place.tokens);
    if (threadIdx.x < place.tokens) {
        from_float(dbeta[of_beta], strength.adjoint(diagonals[kTileTokens + threadIdx.x], beta[of_beta]));
    }
}
