// Scores -> logits: scaled, capped, in base 2, and -inf where a row does not see a key.
//
//   logit = log2(e) * (cap > 0 ? cap * tanh(x / cap) : x)  with x = scales * q . k
#pragma once
#include "common/products.cuh"

namespace cukv {

// tanh by two instructions that are exact enough: absolute error below 2^-21.
__device__ __forceinline__ float tanh_by_ex2(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + ex2(x * (2.0f * LOG2_E)));
}

// Calls visit(score, m_tile, half_idx, token) for each of this lane's scores; `token` counts from
// the first of the step, and lane_row(m_tile, half_idx) is the row.
template <int M_TILES, int TILES, int N, typename Visit>
__device__ __forceinline__ void each_score(float (&s)[M_TILES][TILES][N], Visit visit) {
#pragma unroll
    for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                visit(s[m_tile][tile][i], m_tile, i / 2, tile * 8 + threadIdx.x % 4 * 2 + i % 2);
            }
        }
    }
}

// What scores become logits with. Params: sm_scale, q_scale, k_scale, logits_soft_cap.
template <typename Params>
struct Logits {
    const Params& p;
    float scale;  // with a cap: to multiples of it; without: to base 2

    __device__ __forceinline__ explicit Logits(const Params& p) : p(p) {
        const float natural = p.sm_scale * p.q_scale.get() * p.k_scale.get();
        scale = p.logits_soft_cap > 0.0f ? natural / p.logits_soft_cap : natural * LOG2_E;
    }

    // Of each of this lane's rows, from first_row of the tile on: `scale`, times what the row of the tile was divided by.
    template <int M_TILES, int HALVES, typename Tile>
    __device__ __forceinline__ void row_scales(
        float (&scales)[M_TILES][HALVES], const Tile& tile, int first_row) const {
#pragma unroll
        for (int i = 0; i < M_TILES * HALVES; ++i) {
            const int m_tile = i / HALVES, half_idx = i % HALVES;
            scales[m_tile][half_idx] =
                scale * tile.factor_of(first_row + lane_row(m_tile, half_idx));
        }
    }

    template <int M_TILES, int TILES, int HALVES>
    __device__ __forceinline__ void apply(
        float (&s)[M_TILES][TILES][2 * HALVES], const float (&scales)[M_TILES][HALVES]) const {
        each_score(
            s, [&](float& x, int m_tile, int half_idx, int) { x *= scales[m_tile][half_idx]; });
        if (p.logits_soft_cap > 0.0f) {
            const float cap = p.logits_soft_cap * LOG2_E;
            each_score(s, [&](float& x, int, int, int) { x = cap * tanh_by_ex2(x); });
        }
    }
};

// Which tokens the rows of an item's tile see, beyond the limits of the item, which hold for all.
struct Sight {
    int32_t first_row, diagonal;
    int32_t all_from, all_to;  // every row sees the tokens [all_from, all_to): they need no mask
    int32_t end_token;         // no row sees a token from here on

    // Params: group, causal, window_left.
    template <typename Params>
    __device__ __forceinline__ Sight(const Params& p, const Item& item)
        : first_row(item.first_row), diagonal(item.diagonal) {
        const int32_t first_q = p.group.quotient(first_row);
        const int32_t last_q = p.group.quotient(first_row + item.num_rows - 1);
        all_from = p.window_left < 0 ? 0 : diagonal + last_q - p.window_left;
        all_to = p.causal ? diagonal + first_q + 1 : 0x7fffffff;
        end_token = item.num_rows == 0 ? 0 : p.causal ? diagonal + last_q + 1 : item.end_token;
    }

    template <typename Params>
    __device__ __forceinline__ bool sees(const Params& p, int row, int32_t token) const {
        const int32_t position = diagonal + static_cast<int32_t>(p.group.quotient(first_row + row));
        return (!p.causal || token <= position) &&
               (p.window_left < 0 || token >= position - p.window_left);
    }

    // Masks the logits of the keys from `token` on; bit t of `keys`: whether token + t is a key.
    template <typename Params, int M_TILES, int TILES, int N, typename Bits>
    __device__ __forceinline__ void mask(
        const Params& p, float (&s)[M_TILES][TILES][N], int32_t token, Bits keys) const {
        constexpr int TOKENS = TILES * 8;
        static_assert(TOKENS == 8 * sizeof(Bits), "a bit for each token");
        const bool rows_differ = token < all_from || token + TOKENS > all_to;
        if (keys == static_cast<Bits>(~Bits{0}) && !rows_differ) {
            return;
        }
        each_score(s, [&](float& x, int m_tile, int half_idx, int local) {
            bool seen = keys >> local & 1;
            if (rows_differ) {
                seen = seen && sees(p, lane_row(m_tile, half_idx), token + local);
            }
            x = seen ? x : NO_KEY;
        });
    }
};

}  // namespace cukv
