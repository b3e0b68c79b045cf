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
// tokens whose decay is too strong for that are summed by themselves (tile/fused/gradient_strong.cuh); a warp with many of
// them, or with a chunk too strong for shared factors, takes its pairs level by level (tile/fused/gradient_deep.cuh).
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
#include "tile/fused/gradient_deep.cuh"
#include "tile/fused/gradient_factors.cuh"
#include "tile/fused/gradient_out.cuh"
#include "tile/fused/gradient_products.cuh"
#include "tile/fused/gradient_strong.cuh"
#include "tile/fused/gradient_tile.cuh"
#include "tile/fused/gradient_warp.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sm90_gradients(const Element* q, const Element* k, const Element* g, const Element* beta, const float* A_log,
                   const float* dt_bias, const Element* d_out, const u32* states, const u32* tokens, const float* units,
                   const u32* d_states, const u32* d_tokens, const float* d_units, const TilePlace* tiles,
                   int key_heads, int value_heads, int gate_form, int beta_form, float lower_bound, float scale,
                   void* dq, void* dk, Element* dv, Element* dg, Element* dbeta, float* d_bias, float* d_rate) {
    constexpr bool kGrouped = KDA_GROUPED != 0;
    extern __shared__ __align__(1024) unsigned char memory[];
    const WarpTile here(memory);
    const int head = blockIdx.x % value_heads;
    const i64 tile_and_head = blockIdx.x;
    const TilePlace place = tiles[blockIdx.x / value_heads];
    const i64 offset = (place.token * value_heads + head) * kSize, stride = static_cast<i64>(value_heads) * kSize;
    const int key_head = kGrouped ? head / (value_heads / key_heads) : head;
    const i64 key_stride = kGrouped ? static_cast<i64>(key_heads) * kSize : stride;
    const i64 key_offset = kGrouped ? place.token * key_stride + key_head * kSize : offset;

    // Asked for early.
    const Gates gates(static_cast<GateForm>(gate_form), A_log != nullptr ? expf(A_log[head]) : 1.0f, lower_bound);
    float bias[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        bias[half] = dt_bias != nullptr ? dt_bias[head * kSize + here.channel() + 8 * half] : 0.0f;
    }

    if (threadIdx.x == 0) load_records(here.shared, TileRecords(states, tokens, d_states, d_tokens, tile_and_head));
    load_tokens(here.shared + Tile::kKey, k + key_offset, key_stride, place.tokens);
    load_tokens(here.shared + Tile::kQuery, q + key_offset, key_stride, place.tokens);
    load_tokens(here.shared + Tile::kOut, d_out + offset, stride, place.tokens);
    load_tokens(here.shared + Tile::kGate, g + offset, stride, place.tokens);
    cp_async_commit();
    load_factors(here.floats(Tile::kFactors), units + tile_and_head * Record::kForwardUnits,
                 d_units + tile_and_head * Record::kBackwardUnits, place.tokens);
    const i64 of_beta = (place.token + threadIdx.x) * value_heads + head;
    const Strength strength(static_cast<BetaForm>(beta_form));
    if (threadIdx.x < kTileTokens) {
        here.floats(Tile::kStrengths)[threadIdx.x] = threadIdx.x < place.tokens ? strength.of(beta[of_beta]) : 0.0f;
    }
    cp_async_wait<0>();
    __syncthreads();

    const Factors factors(here.floats(Tile::kFactors), here.lane);
    find_norms(memory, here.floats(Tile::kNorms));
    convert_out(memory, factors.at);
    fill_gates(memory, place.tokens, gates.missing());
    wait_for_records(here.shared, 0);
    clear_missing_chunk(memory, place.tokens);
    __syncthreads();

    // The products of tokens wait in registers until the states are no longer needed: their place is the states'.
    const TokenProducts of_tokens(here, factors);
    wait_for_records(here.shared, 1);
    StateProducts products(here, factors);
    __syncthreads();

    const PairBlocks blocks = {here.floats(Tile::kPairs)};
    of_tokens.place(here, blocks);
    const WarpGates warp_gates(gates, bias);
    const bool risky = !kBounded && warp_gates.decay_beyond(here, kMostOfSharedToken);
    __syncthreads();

    put_value_gradients(here, factors);
    products.apply_strengths(here);
    ChannelTokens of_decay;
    StrongTokens strong;
    if (!kBounded && risky) {
        const DeepTile tile(here, warp_gates, scale);
        strong = StrongTokens::of(tile.units, kMostOfSharedToken, here.lane);
        if (!strong.many()) strong.take(here, tile, products, blocks);
    }
    SharedFactors shared_factors(here, warp_gates);
    if (!kBounded && __any_sync(kAllLanes, strong.many() || shared_factors.too_deep)) {
        take_by_levels(here, warp_gates, products, of_decay, blocks, scale);
    } else {
        shared_factors.take(here, products, of_decay, blocks, scale);
        if (!kBounded && strong.any()) strong.put(here, of_decay);
    }

    put_gate_gradients(here, warp_gates, GateAdjoint(gates, lower_bound), of_decay, d_bias + tile_and_head * kSize,
                       d_rate + tile_and_head * 8 + here.warp);
    here.fetch_parked(products.d_query, Tile::kParked);
    const NormAdjoint norm(here, products.d_query, products.d_key);
    norm.take(here, products.d_key, 0, 1.0f);
    norm.take(here, products.d_query, 1, scale);
    if constexpr (kGrouped) {
        store_channels(static_cast<float*>(dk) + offset + here.channel(), products.d_key, stride, place.tokens,
                       here.lane);
        store_channels(static_cast<float*>(dq) + offset + here.channel(), products.d_query, stride, place.tokens,
                       here.lane);
    } else {
        here.store(Tile::kKey, products.d_key);
        here.store(Tile::kQuery, products.d_query);
    }
    __syncthreads();

    if constexpr (!kGrouped) {
        store_tokens(memory + Tile::kKey, static_cast<Element*>(dk) + offset, stride, place.tokens);
        store_tokens(memory + Tile::kQuery, static_cast<Element*>(dq) + offset, stride, place.tokens);
    }
    store_tokens(memory + Tile::kGate, dg + offset, stride, place.tokens);
    store_tokens(memory + Tile::kOut, dv + offset, stride, place.tokens);
    if (threadIdx.x < place.tokens) {
        const float along = here.floats(Tile::kDiagonals)[kTileTokens + threadIdx.x];
        from_float(dbeta[of_beta], strength.adjoint(along, beta[of_beta]));
    }
}
