// The two products of attention with operands swapped, by one warp on tensor cores: scores^T = k
// q^T and sums^T += v^T weights^T.
//
// Keys, and features of values, are the 16 rows of a tensor core's product and query rows are its 8
// columns: so 8 query rows fill it, and no operand is zeros. Lane l holds, with g = l / 4 and t = l
// % 4,
//
//   scores [n][i][2 * h + e] = key 16 i + 8 h + g  of row 8 n + 2 t + e
//   sums   [n][i][2 * h + e] = feature 16 i + 8 h + g  (fp8: 16 i + 2 g + h)  of row 8 n + 2 t + e
//
// Operands are those of common/operands.cuh, two tiles of 8 at a time. Of fp8 values these are the
// even columns of 16 and the odd ones, hence the order of sums.
#pragma once
#include "common/operands.cuh"
#include "common/queries.cuh"

namespace cukv {

// Scores, then logits, of ROWS query rows and TOKENS keys.
template <int ROWS, int TOKENS>
struct SwappedScores {
    static constexpr int N_TILES = ROWS / 8, TILES = TOKENS / 16;
    static_assert(ROWS % 8 == 0 && TOKENS % 16 == 0, "whole tiles of a tensor core");

    float x[N_TILES][TILES][4];

    __device__ __forceinline__ SwappedScores() : x{} {}
};

// The rows of which a lane holds scores and sums.
__device__ __forceinline__ int swapped_row(int n_tile, int e) {
    return n_tile * 8 + threadIdx.x % 4 * 2 + e;
}

// Calls visit(score, n_tile, e, row, token) for each of this lane's scores; `token` counts from the
// first of the step.
template <int ROWS, int TOKENS, typename Visit>
__device__ __forceinline__ void each_score(SwappedScores<ROWS, TOKENS>& s, Visit visit) {
    using Scores = SwappedScores<ROWS, TOKENS>;
    const int g = threadIdx.x % WARP_SIZE / 4;
#pragma unroll
    for (int n_tile = 0; n_tile < Scores::N_TILES; ++n_tile) {
#pragma unroll
        for (int tile = 0; tile < Scores::TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int e = i % 2, token = tile * 16 + i / 2 * 8 + g;
                visit(s.x[n_tile][tile][i], n_tile, e, swapped_row(n_tile, e), token);
            }
        }
    }
}

// A tile's queries as right operands. Loaded once if they STAY in registers, else every time that
// they are asked for.
template <typename KV, int HEAD_DIM, int ROWS, bool STAY_>
struct SwappedQueries {
    static constexpr bool STAY = STAY_;
    static constexpr int N_TILES = ROWS / 8, K_STEPS = HEAD_DIM / 16;

    using Step = uint2[N_TILES];  // 16 columns of all rows

    const QueryTile<KV, HEAD_DIM, ROWS>& tile;
    Step held[STAY ? K_STEPS : 1];

    __device__ __forceinline__ explicit SwappedQueries(const QueryTile<KV, HEAD_DIM, ROWS>& tile)
        : tile(tile) {
        if constexpr (STAY) {
#pragma unroll
            for (int k_step = 0; k_step < K_STEPS; ++k_step) {
                load(held[k_step], k_step);
            }
        }
    }

    __device__ __forceinline__ void load(Step& b, int k_step) const {
        const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n_tile = 0; n_tile < N_TILES; ++n_tile) {
            const Operand<KV>* q = &tile.x[n_tile * 8 + g][k_step * 16];
            if constexpr (is_fp8<KV>) {
                b[n_tile] = *reinterpret_cast<const uint2*>(q + 4 * t);
            } else {
                b[n_tile].x = *reinterpret_cast<const uint32_t*>(q + 2 * t);
                b[n_tile].y = *reinterpret_cast<const uint32_t*>(q + 2 * t + 8);
            }
        }
    }

    __device__ __forceinline__ void get(Step& b, int k_step) const {
        if constexpr (STAY) {
#pragma unroll
            for (int n_tile = 0; n_tile < N_TILES; ++n_tile) {
                b[n_tile] = held[k_step][n_tile];
            }
        } else {
            load(b, k_step);
        }
    }
};

// s += k q^T for the keys of a buffer, which begins at `keys`.
template <typename KV, int ROW_BYTES, typename Queries, int ROWS, int TOKENS>
__device__ __forceinline__ void multiply_keys(
    SwappedScores<ROWS, TOKENS>& s, const Queries& queries, uint32_t keys) {
    using Keys = KeyOperands<KV>;
    static_assert(TOKENS / 8 % Keys::TILES == 0, "keys are loaded whole ldmatrix at a time");
    const uint32_t from = Keys::template left_address<ROW_BYTES>(keys);
#pragma unroll(Queries::STAY ? Queries::K_STEPS : 4)
    for (int k_step = 0; k_step < Queries::K_STEPS; ++k_step) {
        typename Queries::Step b;
        queries.get(b, k_step);
#pragma unroll
        for (int tile = 0; tile < TOKENS / 8; tile += Keys::TILES) {
            Keys loaded;
            loaded.template load<ROW_BYTES>(from, tile, k_step);
#pragma unroll
            for (int i = 0; i < Keys::TILES; i += 2) {
                const LeftOperand left = loaded.left(i);
#pragma unroll
                for (int n_tile = 0; n_tile < ROWS / 8; ++n_tile) {
                    float (&c)[4] = s.x[n_tile][(tile + i) / 2];
                    mma_m16n8k16<Operand<KV>>(c, left.a, b[n_tile].x, b[n_tile].y);
                }
            }
        }
    }
}

// Weights of TOKENS keys as the product takes them: of row 8 n + g, with t = l % 4, keys 16 i + 2 t
// and the next, and those 8 further on.
template <int ROWS, int TOKENS>
struct SwappedWeights {
    uint2 pairs[TOKENS / 16][ROWS / 8];
};

// The values of a buffer as left operands. Loaded at once if they STAY in registers, and then the
// buffer may be filled again; else every time that they are asked for.
template <typename KV, int ROW_BYTES, int FEAT_TILES, int TOKENS, bool STAY>
struct SwappedValues {
    using Loaded = ValueOperands<KV>;
    static constexpr int LOADS = TOKENS / Loaded::TOKENS;
    static_assert(TOKENS % Loaded::TOKENS == 0, "values are loaded whole ldmatrix at a time");

    uint32_t from;
    Loaded held[STAY ? FEAT_TILES : 1][LOADS];

    // Of the buffer that begins at `values`.
    __device__ __forceinline__ explicit SwappedValues(uint32_t values)
        : from(Loaded::template left_address<ROW_BYTES>(values)) {
        if constexpr (STAY) {
#pragma unroll
            for (int i = 0; i < FEAT_TILES * LOADS; ++i) {
                load(held[i / LOADS][i % LOADS], i / LOADS, i % LOADS);
            }
        }
    }

    __device__ __forceinline__ void load(Loaded& a, int tile, int i) const {
        a.template load<ROW_BYTES>(from, i * Loaded::TOKENS, 2 * tile);
    }

    // Two tiles of 8 features, the tile-th two, of the i-th tokens.
    __device__ __forceinline__ void get(Loaded& a, int tile, int i) const {
        if constexpr (STAY) {
            a = held[tile][i];
        } else {
            load(a, tile, i);
        }
    }
};

// o += v^T weights^T.
template <typename KV, typename Values, int N_TILES, int FEAT_TILES, int ROWS, int TOKENS>
__device__ __forceinline__ void multiply_values(
    float (&o)[N_TILES][FEAT_TILES][4],
    const SwappedWeights<ROWS, TOKENS>& weights,
    const Values& values) {
    using Loaded = typename Values::Loaded;
#pragma unroll
    for (int tile = 0; tile < FEAT_TILES; ++tile) {
        if (is_fp8<KV> && tile % 4 == 0) {
            __syncwarp();  // keeps the compiler from loading all tiles first, and spilling
        }
#pragma unroll
        for (int i = 0; i < Values::LOADS; ++i) {
            Loaded loaded;
            values.get(loaded, tile, i);
#pragma unroll
            for (int j = 0; j < Loaded::TOKENS / 16; ++j) {
                const LeftOperand left = loaded.left(j);
#pragma unroll
                for (int n_tile = 0; n_tile < N_TILES; ++n_tile) {
                    const uint2& b = weights.pairs[i * Loaded::TOKENS / 16 + j][n_tile];
                    mma_m16n8k16<Operand<KV>>(o[n_tile][tile], left.a, b.x, b.y);
                }
            }
        }
    }
}

}  // namespace cukv
