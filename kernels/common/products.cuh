// The two products of attention, by one warp on tensor cores: scores = q k^T and sums += weights v.
//
// A warp's rows are M_TILES tiles of 16, or one of 8 (HALVES = 1): the upper half of a tile of 16 is
// then neither loaded nor kept. An accumulator is float[M_TILES][TILES][2 * HALVES]; lane l holds of
// tile m and of columns 8 * tile to 8 * tile + 7, with g = l / 4 and t = l % 4,
//
//   [m][tile][2 * h + e] = row 16 m + 8 h + g, column 8 * tile + 2 t + e
//
// Columns are keys for scores and weights, features for sums (of fp8 in the order of
// common/operands.cuh). Scores become the left operand of the second product where they are: a
// lane's columns of two tiles are the columns that the operand wants of it.
#pragma once
#include "common/operands.cuh"
#include "common/queries.cuh"

namespace cukv {

// The row that this lane holds of a half of a tile of rows.
__device__ __forceinline__ int lane_row(int m_tile, int half_idx) {
    return m_tile * 16 + half_idx * 8 + threadIdx.x % WARP_SIZE / 4;
}

// The queries of a warp as left operands: rows from first_row of the tile on. Loaded once if they
// STAY in registers, else every time that they are asked for.
template <typename KV, int HEAD_DIM, int TILE_ROWS, int ROWS, bool STAY_>
struct QueryFragments {
    static constexpr bool STAY = STAY_;
    static constexpr int M_TILES = ROWS == 8 ? 1 : ROWS / 16, HALVES = ROWS == 8 ? 1 : 2;
    static constexpr int K_STEPS = HEAD_DIM / 16;
    static_assert(ROWS == 8 || ROWS % 16 == 0, "rows are whole tiles of a tensor core");

    using Step = uint32_t[M_TILES][2 * HALVES];  // 16 columns of all rows, for mma_m16n8k16

    const QueryTile<KV, HEAD_DIM, TILE_ROWS>& tile;
    int first_row;
    Step held[STAY ? K_STEPS : 1];

    __device__ __forceinline__
    QueryFragments(const QueryTile<KV, HEAD_DIM, TILE_ROWS>& tile, int first_row)
        : tile(tile), first_row(first_row) {
        if constexpr (STAY) {
#pragma unroll
            for (int k_step = 0; k_step < K_STEPS; ++k_step) {
                load(held[k_step], k_step);
            }
        }
    }

    __device__ __forceinline__ void load(Step& a, int k_step) const {
        const int t = threadIdx.x % 4, lane_idx = threadIdx.x % WARP_SIZE;
#pragma unroll
        for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
            if constexpr (!is_fp8<KV> && HALVES == 2) {
                const int row = first_row + m_tile * 16 + lane_idx % 16;
                ldmatrix_x4(a[m_tile], smem_address(&tile.x[row][k_step * 16 + lane_idx / 16 * 8]));
                continue;
            }
#pragma unroll
            for (int half_idx = 0; half_idx < HALVES; ++half_idx) {
                const int row = first_row + lane_row(m_tile, half_idx);
                const Operand<KV>* q = &tile.x[row][k_step * 16];
                uint2 pair;
                if constexpr (is_fp8<KV>) {  // the order of columns of KeyOperands
                    pair = *reinterpret_cast<const uint2*>(q + 4 * t);
                } else {
                    pair.x = *reinterpret_cast<const uint32_t*>(q + 2 * t);
                    pair.y = *reinterpret_cast<const uint32_t*>(q + 2 * t + 8);
                }
                a[m_tile][half_idx] = pair.x;
                a[m_tile][HALVES + half_idx] = pair.y;
            }
        }
    }

    __device__ __forceinline__ void get(Step& a, int k_step) const {
        if constexpr (STAY) {
#pragma unroll
            for (int i = 0; i < M_TILES * 2 * HALVES; ++i) {
                const int m_tile = i / (2 * HALVES), word = i % (2 * HALVES);
                a[m_tile][word] = held[k_step][m_tile][word];
            }
        } else {
            load(a, k_step);
        }
    }
};

// s += q k^T for the keys of a buffer, which begins at `keys`.
template <typename KV, int ROW_BYTES, typename Fragments, int M_TILES, int TILES, int N>
__device__ __forceinline__ void multiply_keys(
    float (&s)[M_TILES][TILES][N], const Fragments& queries, uint32_t keys) {
    using Keys = KeyOperands<KV>;
    static_assert(TILES % Keys::TILES == 0, "keys are loaded whole ldmatrix at a time");
#pragma unroll(Fragments::STAY ? Fragments::K_STEPS : 4)
    for (int k_step = 0; k_step < Fragments::K_STEPS; ++k_step) {
        typename Fragments::Step a;
        queries.get(a, k_step);
#pragma unroll
        for (int first = 0; first < TILES; first += Keys::TILES) {
            Keys b;
            b.template load<ROW_BYTES>(keys, first, k_step);
#pragma unroll
            for (int i = 0; i < Keys::TILES; ++i) {
                const OperandPair pair = b[i];
#pragma unroll
                for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
                    mma_m16n8k16<Operand<KV>>(s[m_tile][first + i], a[m_tile], pair.b0, pair.b1);
                }
            }
        }
    }
}

// Weights of 16 keys, two tiles of an accumulator, as the left operand.
template <typename KV, int N>
__device__ __forceinline__ void pack_weights(
    uint32_t (&a)[N], const float (&low)[N], const float (&high)[N]) {
    constexpr int HALVES = N / 2;
#pragma unroll
    for (int half_idx = 0; half_idx < HALVES; ++half_idx) {
        a[half_idx] = cvt_pair<Operand<KV>>(low[2 * half_idx], low[2 * half_idx + 1]);
        a[HALVES + half_idx] = cvt_pair<Operand<KV>>(high[2 * half_idx], high[2 * half_idx + 1]);
    }
}

// o += s v for the values of a buffer, which begins at `values`; s are weights.
template <typename KV, int ROW_BYTES, int M_TILES, int FEAT_TILES, int TILES, int N>
__device__ __forceinline__ void multiply_values(
    float (&o)[M_TILES][FEAT_TILES][N], const float (&s)[M_TILES][TILES][N], uint32_t values) {
    using Values = ValueOperands<KV>;
    static_assert(TILES * 8 % Values::TOKENS == 0, "values are loaded whole ldmatrix at a time");
    uint32_t a[TILES / 2][M_TILES][N];
#pragma unroll
    for (int i = 0; i < TILES / 2 * M_TILES; ++i) {
        const int j = i / M_TILES, m_tile = i % M_TILES;
        pack_weights<KV>(a[j][m_tile], s[m_tile][2 * j], s[m_tile][2 * j + 1]);
    }
#pragma unroll
    for (int token = 0; token < TILES * 8; token += Values::TOKENS) {
#pragma unroll
        for (int tile = 0; tile < FEAT_TILES; tile += 2) {
            if (is_fp8<KV> && tile % 8 == 0) {
                __syncwarp();  // keeps the compiler from loading all tiles first, and spilling
            }
            Values b;
            b.template load<ROW_BYTES>(values, token, tile);
#pragma unroll
            for (int j = 0; j < Values::TOKENS / 16; ++j) {
                OperandPair even, odd;
                b.get(j, even, odd);
#pragma unroll
                for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
                    const auto& weights = a[token / 16 + j][m_tile];
                    mma_m16n8k16<Operand<KV>>(o[m_tile][tile], weights, even.b0, even.b1);
                    mma_m16n8k16<Operand<KV>>(o[m_tile][tile + 1], weights, odd.b0, odd.b1);
                }
            }
        }
    }
}

}  // namespace cukv
