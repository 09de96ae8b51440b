// Which keys the rows of a warp see, as bits: for kernels that score many keys of many rows at a time.
//
// A word is 32 keys of a row. A lane holds the words of its rows; scores lie as common/products.cuh
// says, so that of a word it wants bits 8 * tile + 2 t and the next of each tile of 8.
#pragma once
#include "common/logits.cuh"

namespace cukv {

// The lowest `num` bits, for any num.
__device__ __forceinline__ uint32_t low_bits(int num) {
    return num <= 0 ? 0 : num >= 32 ? 0xffffffffu : (1u << num) - 1;
}

template <int M_TILES, int HALVES, int WORDS>
struct RowBits {
    uint32_t words[WORDS][M_TILES][HALVES];

    // Calls visit(word, row, first): row of the warp's, first key of the word among those scored.
    template <typename Visit>
    __device__ __forceinline__ void each_word(Visit visit) {
#pragma unroll
        for (int i = 0; i < WORDS * M_TILES * HALVES; ++i) {
            const int word = i / (M_TILES * HALVES), m_tile = i / HALVES % M_TILES;
            visit(words[word][m_tile][i % HALVES], lane_row(m_tile, i % HALVES), word * 32);
        }
    }

    // Those of a mask, of the listed keys from `token` on, which is a multiple of TOKENS.
    template <typename Params>
    __device__ __forceinline__ void load_mask(const Params& p, const Sight& sight, int32_t token) {
        each_word([&](uint32_t& word, int row, int first) {
            word = sight.mask_word(p, row, token + first) >> token % 32;
        });
    }

    // Those of causal and the window, of the keys from `token` on.
    template <typename Params>
    __device__ __forceinline__ void limit(const Params& p, const Sight& sight, int32_t token) {
        each_word([&](uint32_t& word, int row, int first) {
            const int32_t last = sight.position(p, row) - token - first;
            word = p.causal ? low_bits(last + 1) : 0xffffffffu;
            word &= p.window_left < 0 ? 0xffffffffu : ~low_bits(last - p.window_left);
        });
    }

    // Masks logits; bit t of `keys`: whether the t-th is one of a key.
    template <int TILES, typename Bits>
    __device__ __forceinline__ void apply(float (&s)[M_TILES][TILES][2 * HALVES], Bits keys) const {
        static_assert(8 * sizeof(Bits) == TILES * 8, "a bit for each key");
#pragma unroll
        for (int i = 0; i < WORDS * M_TILES * HALVES; ++i) {
            const int word = i / (M_TILES * HALVES), m_tile = i / HALVES % M_TILES;
            const int half_idx = i % HALVES;
            const uint32_t bits =
                (words[word][m_tile][half_idx] & static_cast<uint32_t>(keys >> word * 32 % 64)) >>
                threadIdx.x % 4 * 2;
#pragma unroll
            for (int k = 0; k < min(TILES, 4) * 2; ++k) {
                float& x = s[m_tile][word * 4 + k / 2][2 * half_idx + k % 2];
                x = bits >> (k / 2 * 8 + k % 2) & 1 ? x : NO_KEY;
            }
        }
    }
};

}  // namespace cukv
