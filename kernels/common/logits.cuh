// Scores -> logits: scaled, capped, in base 2, and -inf where a row does not see a key.
//
//   logit = log2(e) * (cap > 0 ? cap * tanh(x / cap) : x)  with x = scales * q . k
//
// A kernel's accumulator of scores comes with its each_score(s, visit), of common/products.cuh or
// common/swapped.cuh, which says of each score whose row and token it is.
#pragma once
#include "common/queries.cuh"
#include "common/window.cuh"

namespace cukv {

// tanh with a relative error below 2^-18: what is capped at a large number must not lose more than
// the logits do. Near 0, where an exponential would leave only an absolute error, by the first
// terms of its series.
__device__ __forceinline__ float tanh_of(float x) {
    const float xx = x * x;
    float series = fmaf(xx, 62.0f / 2835.0f, -17.0f / 315.0f);
    series = fmaf(xx, series, 2.0f / 15.0f);
    series = fmaf(xx, series, -1.0f / 3.0f);
    series = fmaf(x * xx, series, x);
    const float by_ex2 = 1.0f - __fdividef(2.0f, 1.0f + ex2(x * (2.0f * LOG2_E)));
    return xx < 0.0625f ? series : by_ex2;
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

    // Of a scale that was worked out before.
    __device__ __forceinline__ Logits(const Params& p, float scale) : p(p), scale(scale) {}

    // Whether logits are scores times one positive number, for rows that nothing was divided out
    // of.
    __device__ __forceinline__ bool is_scale() const {
        return !(p.logits_soft_cap > 0.0f) && scale > 0.0f;
    }

    // Of each of this lane's rows, which is row(i, j) of the tile: `scale`, times what the row was
    // divided by.
    template <int I, int J, typename Tile, typename Row>
    __device__ __forceinline__ void row_scales(
        float (&scales)[I][J], const Tile& tile, Row row) const {
#pragma unroll
        for (int i = 0; i < I * J; ++i) {
            scales[i / J][i % J] = scale * tile.factor_of(row(i / J, i % J));
        }
    }

    template <typename Scores, int I, int J>
    __device__ __forceinline__ void apply(Scores& s, const float (&scales)[I][J]) const {
        if (p.logits_soft_cap > 0.0f) {  // both at once: fewer numbers are on their way
            const float cap = p.logits_soft_cap * LOG2_E;
            each_score(
                s, [&](float& x, int i, int j, int, int) { x = cap * tanh_of(x * scales[i][j]); });
        } else {
            each_score(s, [&](float& x, int i, int j, int, int) { x *= scales[i][j]; });
        }
    }
};

// Which tokens the rows of an item's tile see, beyond the limits of the item, which hold for all.
// Under a mask tokens are listed ones, and neither causal nor the window applies.
struct Sight {
    int32_t first_row, diagonal;
    int32_t first_q_row, last_q_row;  // of q
    int32_t mask_entry;
    int32_t all_from, all_to;  // every row sees the tokens [all_from, all_to): they need no mask
    int32_t end_token;         // no row sees a token from here on

    // Params: group, causal, window_left, first_seen.
    template <typename Params>
    __device__ __forceinline__ Sight(const Params& p, const Item& item)
        : first_row(item.first_row),
          diagonal(item.diagonal),
          first_q_row(item.first_q_row),
          mask_entry(item.mask_entry) {
        const int32_t first_q = p.group.quotient(first_row);
        const int32_t last_q =
            item.num_rows == 0 ? first_q - 1 : p.group.quotient(first_row + item.num_rows - 1);
        last_q_row = first_q_row + last_q;
        all_from = SeenFrom(p, first_q_row, diagonal, first_q, last_q).largest;
        all_to = p.causal ? diagonal + first_q + 1 : 0x7fffffff;
        end_token = item.num_rows == 0 ? 0 : p.causal ? diagonal + last_q + 1 : item.end_token;
    }

    // The class of the half step that a token is in, for all rows of the tile.
    template <typename Params>
    __device__ __forceinline__ int32_t mask_class(const Params& p, int32_t token) const {
        return p.work.mask.given() ? class_of(p.work.mask.entry_of(mask_entry, token), token)
                                   : FULL;
    }

    // Where the bit of a token of `entry` is in the mask of a row.
    template <typename Params>
    __device__ __forceinline__ const uint32_t* mask_word(
        const Params& p, int row, int32_t entry, int32_t token) const {
        const MaskTiles& mask = p.work.mask;
        const int32_t tile_row = first_row & -(1 << mask.row_bits);
        const uint32_t query = p.group.quotient(first_row + row) - p.group.quotient(tile_row);
        return mask.word(mask_entry, entry, token) + query * MASK_WORDS;
    }

    template <typename Params>
    __device__ __forceinline__ bool sees(const Params& p, int row, int32_t token) const {
        if (p.work.mask.given()) {
            const int32_t entry = p.work.mask.entry_of(mask_entry, token);
            return *mask_word(p, row, entry, token) >> token % 32 & 1;
        }
        return (!p.causal || token <= position(p, row)) &&
               (p.window_left < 0 || token >= first_seen(p, row));
    }

    // Of a row's query.
    template <typename Params>
    __device__ __forceinline__ int32_t position(const Params& p, int row) const {
        return diagonal + static_cast<int32_t>(p.group.quotient(first_row + row));
    }

    // The first key that a row's query sees, in a call with a window; of a row past the tile's,
    // any.
    template <typename Params>
    __device__ __forceinline__ int32_t first_seen(const Params& p, int row) const {
        const int32_t at = position(p, row);
        return cukv::first_seen(p, min(first_q_row + at - diagonal, last_q_row), at);
    }

    // Whether causal or the window hides some of the tokens [token, end) from some row.
    __device__ __forceinline__ bool hides(int32_t token, int32_t end) const {
        return token < all_from || end > all_to;
    }

    // Masks the logits of the keys from `token` on; bit t of `keys`: whether token + t is a key.
    template <typename Params, typename Scores, typename Bits>
    __device__ __forceinline__ void mask(
        const Params& p, Scores& s, int32_t token, Bits keys) const {
        constexpr int TOKENS = 8 * sizeof(Bits);
        const bool rows_differ = hides(token, token + TOKENS) || mask_class(p, token) != FULL;
        if (keys == static_cast<Bits>(~Bits{0}) && !rows_differ) {
            return;
        }
        each_score(s, [&](float& x, int, int, int row, int local) {
            bool seen = keys >> local & 1;
            if (rows_differ) {
                seen = seen && sees(p, row, token + local);
            }
            x = seen ? x : NO_KEY;
        });
    }
};

}  // namespace cukv
