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

// Two tiles of 8 rows each, as tensor cores take 8 columns, as the left operand of 16 rows.
__device__ __forceinline__ void as_left(
    uint32_t (&a)[4], const OperandPair& first, const OperandPair& second) {
    a[0] = first.b0, a[1] = second.b0, a[2] = first.b1, a[3] = second.b1;
}

// s += k q^T for the keys of a buffer, which begins at `keys`.
template <typename KV, int ROW_BYTES, typename Queries, int ROWS, int TOKENS>
__device__ __forceinline__ void multiply_keys(
    SwappedScores<ROWS, TOKENS>& s, const Queries& queries, uint32_t keys) {
    using Keys = KeyOperands<KV>;
    static_assert(TOKENS / 8 % Keys::TILES == 0, "keys are loaded whole ldmatrix at a time");
    const uint32_t from = Keys::template address<ROW_BYTES>(keys);
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
                uint32_t a[4];
                as_left(a, loaded[i], loaded[i + 1]);
#pragma unroll
                for (int n_tile = 0; n_tile < ROWS / 8; ++n_tile) {
                    float (&c)[4] = s.x[n_tile][(tile + i) / 2];
                    mma_m16n8k16<Operand<KV>>(c, a, b[n_tile].x, b[n_tile].y);
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

// o += v^T weights^T for the values of a buffer, which begins at `values`.
template <typename KV, int ROW_BYTES, int N_TILES, int FEAT_TILES, int ROWS, int TOKENS>
__device__ __forceinline__ void multiply_values(
    float (&o)[N_TILES][FEAT_TILES][4],
    const SwappedWeights<ROWS, TOKENS>& weights,
    uint32_t values) {
    using Values = ValueOperands<KV>;
    static_assert(TOKENS % Values::TOKENS == 0, "values are loaded whole ldmatrix at a time");
    const uint32_t from = Values::template address<ROW_BYTES>(values);
#pragma unroll
    for (int tile = 0; tile < FEAT_TILES; ++tile) {
        if (is_fp8<KV> && tile % 4 == 0) {
            __syncwarp();  // keeps the compiler from loading all tiles first, and spilling
        }
#pragma unroll
        for (int token = 0; token < TOKENS; token += Values::TOKENS) {
            Values loaded;
            loaded.template load<ROW_BYTES>(from, token, 2 * tile);
#pragma unroll
            for (int j = 0; j < Values::TOKENS / 16; ++j) {
                OperandPair even, odd;
                loaded.get(j, even, odd);
                uint32_t a[4];
                as_left(a, even, odd);
#pragma unroll
                for (int n_tile = 0; n_tile < N_TILES; ++n_tile) {
                    const uint2& b = weights.pairs[token / 16 + j][n_tile];
                    mma_m16n8k16<Operand<KV>>(o[n_tile][tile], a, b.x, b.y);
                }
            }
        }
    }
}

}  // namespace cukv
