// Which keys of a step the rows of a team see: by causal and the window, or by the bits of a mask.
//
// A lane has two rows of the tile, `row` and that 8 below it; scores lie as common/products.cuh
// says. Cta: TOKENS, TEAM_ROWS, own_rows and Smem, as common/team.cuh has them.
#pragma once
#include "common/logits.cuh"

namespace cukv {

// The keys of a step that a lane's rows see, a bit for each of its scores: bit 2 * tile + e of a
// row for the row's e-th score of a tile of 8 keys. So small that it is ready before the scores.
template <int TOKENS>
struct SeenKeys {
    static constexpr int TILES = TOKENS / 8;
    static_assert(TILES <= 16, "a word for a row");

    uint32_t row[2];

    // The first so many keys of the step, as bits.
    static __device__ __forceinline__ uint32_t first(int32_t num) {
        const int32_t of_lane = max(num - static_cast<int32_t>(threadIdx.x % 4 * 2), 0);
        return low_bits(of_lane / 8 * 2 + min(of_lane % 8, 2));
    }

    // Drops pieces of 2^piece_bits keys.
    __device__ __forceinline__ void drop(uint32_t pieces, int32_t piece_bits) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const uint32_t dropped = (pieces >> (tile * 8 >> piece_bits) & 1) * 3 << 2 * tile;
            row[0] &= ~dropped;
            row[1] &= ~dropped;
        }
    }

    // Hides the scores of all other keys among the first KEYS.
    template <int KEYS>
    __device__ __forceinline__ void hide(float (&s)[TILES][4]) const {
#pragma unroll
        for (int tile = 0; tile < KEYS / 8; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[tile][i] = row[i / 2] & 1u << (2 * tile + i % 2) ? s[tile][i] : NO_KEY;
            }
        }
    }
};

template <typename Cta, bool MASKED>
struct TeamSight;

template <typename Cta>
struct TeamSight<Cta, false> {
    int32_t all_from, all_to;  // all of the team's rows see these keys of the item
    int32_t any_to;            // none of them sees keys from here on
    int32_t from[2], to[2];    // each of this lane's

    template <typename Params>
    __device__ __forceinline__ void begin(const Params& p, const Item& item, int team, int row) {
        const auto see = [&](int at_row, int32_t& from, int32_t& to) {
            const int32_t position =
                item.diagonal + static_cast<int32_t>(p.group.quotient(item.first_row + at_row));
            from = p.window_left < 0 ? item.first_token
                                     : max(item.first_token, position - p.window_left);
            to = p.causal ? min(item.end_token, position + 1) : item.end_token;
        };
        see(row, from[0], to[0]);
        see(row + 8, from[1], to[1]);
        // The first row sees no key that another does not see behind it, nor the last before it.
        const int first_row = team * Cta::TEAM_ROWS;
        int32_t first_from;
        see(first_row, first_from, all_to);
        see(first_row + max(Cta::own_rows(item, team) - 1, 0), all_from, any_to);
    }

    __device__ __forceinline__ void look_up(const typename Cta::Smem&, int) {}

    __device__ __forceinline__ bool sees_all(int32_t token) const {
        return token >= all_from && token + Cta::TOKENS <= all_to;
    }

    // Whether no row of the team sees a key of the step's second half.
    __device__ __forceinline__ bool is_half(int32_t token) const {
        return token + Cta::TOKENS / 2 >= any_to;
    }

    template <typename Params>
    __device__ __forceinline__ void load(const Params&) {}

    __device__ __forceinline__ SeenKeys<Cta::TOKENS> seen(int32_t token) const {
        using Seen = SeenKeys<Cta::TOKENS>;
        return {
            Seen::first(to[0] - token) & ~Seen::first(from[0] - token),
            Seen::first(to[1] - token) & ~Seen::first(from[1] - token)};
    }
};

template <typename Cta>
struct TeamSight<Cta, true> {
    int32_t first_entry;            // of the tile
    int32_t query[2];               // of the tile, those of this lane's rows
    int32_t entry = 0;              // of the step
    uint32_t words[2][MASK_WORDS];  // of the step

    template <typename Params>
    __device__ __forceinline__ void begin(const Params& p, const Item& item, int, int row) {
        first_entry = item.mask_entry;
        const uint32_t first_q = p.group.quotient(item.first_row);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            query[h] = p.group.quotient(item.first_row + row + 8 * h) - first_q;
        }
    }

    // What came with the keys of a step.
    __device__ __forceinline__ void look_up(const typename Cta::Smem& smem, int stage) {
        entry = smem.k_entry[stage];
    }

    // Whether all rows of the team see all keys of the step.
    __device__ __forceinline__ bool sees_all(int32_t) const {
        return (entry & ALL_CLASSES) == BOTH_FULL;
    }

    __device__ __forceinline__ bool is_half(int32_t) const {
        static_assert(Cta::TOKENS == MASK_STEP, "classes are those of halves of a step");
        return (entry & ALL_CLASSES) >> 2 == EMPTY;
    }

    // Loads the step's bits, before its scores are there.
    template <typename Params>
    __device__ __forceinline__ void load(const Params& p) {
        const MaskTiles& mask = p.work.mask;
        const int64_t first = int64_t{first_entry + (entry >> 4)} * mask.tile_queries;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint4 x = {};
            if ((entry & ALL_CLASSES) != 0) {  // else there are no keys
                x = ld_global_16(mask.words + (first + query[h]) * MASK_WORDS);
            }
            words[h][0] = x.x;
            words[h][1] = x.y;
            words[h][2] = x.z;
            words[h][3] = x.w;
        }
    }

    __device__ __forceinline__ SeenKeys<Cta::TOKENS> seen(int32_t) const {
        SeenKeys<Cta::TOKENS> keys;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            keys.row[h] = 0;
#pragma unroll
            for (int i = 0; i < MASK_WORDS; ++i) {
                // Two bits of each byte are this lane's.
                const uint32_t x = words[h][i] >> threadIdx.x % 4 * 2 & 0x03030303u;
                keys.row[h] |= ((x | x >> 6 | x >> 12 | x >> 18) & 0xff) << 8 * i;
            }
        }
        return keys;
    }
};

}  // namespace cukv
