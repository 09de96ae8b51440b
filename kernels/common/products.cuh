// The two products of attention, by one warp on tensor cores: scores = q k^T and sums += weights v.
//
// A warp's rows are M_TILES tiles of 16. An accumulator is float[M_TILES][TILES][4]; lane l holds,
// with g = l / 4 and t = l % 4,
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

// Calls visit(score, m_tile, half_idx, row, token) for each of this lane's scores; `token` counts
// from the first of the step.
template <int M_TILES, int TILES, typename Visit>
__device__ __forceinline__ void each_score(float (&s)[M_TILES][TILES][4], Visit visit) {
#pragma unroll
    for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half_idx = i / 2, token = tile * 8 + threadIdx.x % 4 * 2 + i % 2;
                visit(s[m_tile][tile][i], m_tile, half_idx, lane_row(m_tile, half_idx), token);
            }
        }
    }
}

// This lane's addresses of the first ldmatrix of each operand.
struct OperandAddresses {
    uint32_t keys;
    uint32_t values;
    uint32_t queries;
};

// The queries of a warp as left operands: ROWS rows from first_row of the tile on.
template <typename KV, int HEAD_DIM, int TILE_ROWS, int ROWS>
struct QueryFragments {
    static constexpr int M_TILES = ROWS / 16, K_STEPS = HEAD_DIM / 16;
    static_assert(ROWS % 16 == 0, "rows are whole tiles of a tensor core");

    using Step = uint32_t[M_TILES][4];  // 16 columns of all rows, for mma_m16n8k16

    const QueryTile<KV, HEAD_DIM, TILE_ROWS>& tile;
    int first_row;
    uint32_t address;  // of OperandAddresses; fp8 does not need it

    static __device__ __forceinline__ uint32_t
    address_of(const QueryTile<KV, HEAD_DIM, TILE_ROWS>& tile, int first_row) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        return smem_address(&tile.x[first_row + lane_idx % 16][lane_idx / 16 * 8]);
    }

    __device__ __forceinline__ void load(Step& a, int k_step) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
            if constexpr (is_fp8<KV>) {  // the order of columns of KeyOperands
#pragma unroll
                for (int half_idx = 0; half_idx < 2; ++half_idx) {
                    const int row = first_row + lane_row(m_tile, half_idx);
                    const uint2 pair =
                        *reinterpret_cast<const uint2*>(&tile.x[row][k_step * 16 + 4 * t]);
                    a[m_tile][half_idx] = pair.x;
                    a[m_tile][2 + half_idx] = pair.y;
                }
            } else {
                ldmatrix_x4(a[m_tile], address + m_tile * 16 * sizeof(tile.x[0]) + k_step * 32);
            }
        }
    }
};

// s += q k^T for the keys at `address`, of OperandAddresses. meanwhile(n) is called behind every
// ldmatrix of keys, the n-th: what it does takes time that the products leave.
template <
    typename KV,
    int ROW_BYTES,
    typename Fragments,
    int M_TILES,
    int TILES,
    typename Meanwhile>
__device__ __forceinline__ void multiply_keys(
    float (&s)[M_TILES][TILES][4],
    const Fragments& queries,
    uint32_t address,
    Meanwhile meanwhile) {
    using Keys = KeyOperands<KV>;
    static_assert(TILES % Keys::TILES == 0, "keys are loaded whole ldmatrix at a time");
    // Keys come one ldmatrix ahead, queries one step.
    constexpr int LOADS = TILES / Keys::TILES, NUM = Fragments::K_STEPS * LOADS;
    typename Fragments::Step a[2];
    Keys b[2];
    queries.load(a[0], 0);
    b[0].template load<ROW_BYTES>(address, 0, 0);
#pragma unroll
    for (int n = 0; n < NUM; ++n) {
        const int k_step = n / LOADS, first = n % LOADS * Keys::TILES;
        if (n + 1 < NUM) {
            b[(n + 1) % 2].template load<ROW_BYTES>(
                address, (n + 1) % LOADS * Keys::TILES, (n + 1) / LOADS);
        }
        if (n % LOADS == 0 && k_step + 1 < Fragments::K_STEPS) {
            queries.load(a[(k_step + 1) % 2], k_step + 1);
        }
        meanwhile(n);
#pragma unroll
        for (int i = 0; i < Keys::TILES; ++i) {
            const OperandPair pair = b[n % 2][i];
#pragma unroll
            for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
                mma_m16n8k16<Operand<KV>>(
                    s[m_tile][first + i], a[k_step % 2][m_tile], pair.b0, pair.b1);
            }
        }
    }
}

// Weights of 16 keys, two tiles of an accumulator, as the left operand.
template <typename KV>
__device__ __forceinline__ void pack_weights(
    uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
#pragma unroll
    for (int half_idx = 0; half_idx < 2; ++half_idx) {
        a[half_idx] = cvt_pair<Operand<KV>>(low[2 * half_idx], low[2 * half_idx + 1]);
        a[2 + half_idx] = cvt_pair<Operand<KV>>(high[2 * half_idx], high[2 * half_idx + 1]);
    }
}

// o += s v for the values at `address`, of OperandAddresses; s are weights. meanwhile(n, num) is
// called behind the n-th of `num` ldmatrix: registers of weights become free as n grows.
template <typename KV, int ROW_BYTES, int M_TILES, int FEAT_TILES, int TILES, typename Meanwhile>
__device__ __forceinline__ void multiply_values(
    float (&o)[M_TILES][FEAT_TILES][4],
    const float (&s)[M_TILES][TILES][4],
    uint32_t address,
    Meanwhile meanwhile) {
    using Values = ValueOperands<KV>;
    static_assert(TILES * 8 % Values::TOKENS == 0, "values are loaded whole ldmatrix at a time");
    // Values come one ldmatrix ahead; weights are packed where they are needed, so that the
    // compiler computes the exponentials of some while others are multiplied.
    uint32_t a[Values::TOKENS / 16][M_TILES][4];
    constexpr int PAIRS = FEAT_TILES / 2, NUM = TILES * 8 / Values::TOKENS * PAIRS;
    Values b[2];
    b[0].template load<ROW_BYTES>(address, 0, 0);
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        const int token = i / PAIRS * Values::TOKENS, tile = i % PAIRS * 2;
        if (i + 1 < NUM) {
            b[(i + 1) % 2].template load<ROW_BYTES>(
                address, (i + 1) / PAIRS * Values::TOKENS, (i + 1) % PAIRS * 2);
        }
        meanwhile(i, NUM);
        if (tile == 0) {
#pragma unroll
            for (int k = 0; k < Values::TOKENS / 16 * M_TILES; ++k) {
                const int j = k / M_TILES, m_tile = k % M_TILES, from = token / 8 + 2 * j;
                pack_weights<KV>(a[j][m_tile], s[m_tile][from], s[m_tile][from + 1]);
            }
        }
        if (is_fp8<KV> && tile % 8 == 0) {
            __syncwarp();  // keeps the compiler from loading all tiles first, and spilling
        }
#pragma unroll
        for (int j = 0; j < Values::TOKENS / 16; ++j) {
            OperandPair even, odd;
            b[i % 2].get(j, even, odd);
#pragma unroll
            for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
                const auto& weights = a[j][m_tile];
                mma_m16n8k16<Operand<KV>>(o[m_tile][tile], weights, even.b0, even.b1);
                mma_m16n8k16<Operand<KV>>(o[m_tile][tile + 1], weights, odd.b0, odd.b1);
            }
        }
    }
}

}  // namespace cukv
