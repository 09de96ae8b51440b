// Which keys the rows of a warp see, as bits: for kernels that score many keys of many rows at a
// time.
//
// A word is 32 keys of a row. A lane holds the words of its rows; scores lie as common/products.cuh
// says, so that of a word it wants bits 8 * tile + 2 t and the next of each tile of 8.
#pragma once
#include "common/logits.cuh"
#include "common/products.cuh"

namespace cukv {

template <int M_TILES, int WORDS>
struct RowBits {
    static_assert(WORDS == 1 || WORDS == 2, "words of a mask are loaded together");

    uint32_t words[M_TILES * 2][WORDS];

    // Those of a mask, of the listed keys of `entry` from `token` on, a multiple of as many as are
    // scored.
    template <typename Params>
    __device__ __forceinline__ void load_mask(
        const Params& p, const Sight& sight, int32_t entry, int32_t token) {
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            const uint32_t* from = sight.mask_word(p, lane_row(i / 2, i % 2), entry, token);
            if constexpr (WORDS == 2) {
                const uint2 pair = *reinterpret_cast<const uint2*>(from);
                words[i][0] = pair.x;
                words[i][1] = pair.y;
            } else {
                words[i][0] = *from >> token % 32;
            }
        }
    }

    // Those of causal and the window, of the keys from `token` on.
    template <typename Params>
    __device__ __forceinline__ void limit(const Params& p, const Sight& sight, int32_t token) {
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            const int32_t at = sight.position(p, lane_row(i / 2, i % 2)) - token;
#pragma unroll
            for (int word = 0; word < WORDS; ++word) {
                words[i][word] = p.causal ? low_bits(at - word * 32 + 1) : 0xffffffffu;
            }
        }
        if (p.window_left < 0) {
            return;
        }
        // A loop of its own: there are no registers for both limits of a row at once.
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            const int32_t from = sight.first_seen(p, lane_row(i / 2, i % 2)) - token;
#pragma unroll
            for (int word = 0; word < WORDS; ++word) {
                words[i][word] &= ~low_bits(from - word * 32);
            }
        }
    }

    // Masks logits; bit t of `keys`: whether the t-th is one of a key.
    template <int TILES, typename Bits>
    __device__ __forceinline__ void apply(float (&s)[M_TILES][TILES][4], Bits keys) const {
        static_assert(sizeof(Bits) == TILES, "a bit for each key");
        const int t = tid_x() % 4;
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
#pragma unroll
            for (int word = 0; word < WORDS; ++word) {
                const uint32_t own = static_cast<uint32_t>(uint64_t{keys} >> word * 32);
                const uint32_t bits = (words[i][word] & own) >> t * 2;
#pragma unroll
                for (int k = 0; k < TILES / WORDS * 2; ++k) {
                    float& x = s[i / 2][word * 4 + k / 2][i % 2 * 2 + k % 2];
                    x = bits >> (k / 2 * 8 + k % 2) & 1 ? x : NO_KEY;
                }
            }
        }
    }
};

// Hides the scores of the listed keys of `entry` from `token` on that rows do not see under a mask,
// or that are none.
template <int M_TILES, int TILES, typename Params>
__device__ __forceinline__ void hide_listed(
    const Params& p,
    const Sight& sight,
    float (&s)[M_TILES][TILES][4],
    int32_t entry,
    int32_t token) {
    RowBits<M_TILES, (TILES + 3) / 4> bits;
    bits.load_mask(p, sight, entry, token);
    bits.apply(s, static_cast<typename UintOf<TILES>::type>(~uint64_t{0}));
}

// Hides the scores of the keys from `token` on that rows do not see; bit t of `keys`: whether the
// t-th is one.
template <int M_TILES, int TILES, typename Params>
__device__ __forceinline__ void hide(
    const Params& p,
    const Sight& sight,
    float (&s)[M_TILES][TILES][4],
    int32_t token,
    uint64_t keys) {
    RowBits<M_TILES, (TILES + 3) / 4> bits;
    if (sight.mask_class(p, token) == MIXED) {
        bits.load_mask(p, sight, p.work.mask.entry_of(sight.mask_entry, token), token);
    } else {
        bits.limit(p, sight, token);
    }
    bits.apply(s, static_cast<typename UintOf<TILES>::type>(keys));
}

}  // namespace cukv
