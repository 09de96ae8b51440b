// Which keys of a step the rows of a team see: by causal and the window, or by the bits of a mask.
//
// A lane has two rows of the tile, `row` and that 8 below it; scores lie as common/products.cuh
// says. Cta: TOKENS, TEAM_ROWS, own_rows and Smem, as common/team.cuh has them.
#pragma once
#include "common/logits.cuh"

namespace cukv {

template <typename Cta, bool MASKED>
struct TeamSight;

template <typename Cta>
struct TeamSight<Cta, false> {
    int32_t all_from, all_to;  // all of the team's rows see these keys of the item
    int32_t end;               // none of them sees a key from here on
    int32_t from[2], to[2];    // each of this lane's

    template <typename Params>
    __device__ __forceinline__ void begin(const Params& p, Item item, int team, int row) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int32_t position =
                item.diagonal +
                static_cast<int32_t>(p.group.quotient(item.first_row + row + 8 * h));
            from[h] = p.window_left < 0 ? item.first_token
                                        : max(item.first_token, position - p.window_left);
            to[h] = p.causal ? min(item.end_token, position + 1) : item.end_token;
        }
        const int num_rows = max(Cta::own_rows(item, team), 1);
        item.first_row += team * Cta::TEAM_ROWS;
        item.num_rows = num_rows;
        const Sight sight(p, item);
        all_from = max(item.first_token, sight.all_from);
        all_to = min(item.end_token, sight.all_to);
        end = min(item.end_token, sight.end_token);
    }

    __device__ __forceinline__ void look_up(const typename Cta::Smem&, int) {}

    __device__ __forceinline__ bool sees_all(int32_t token) const {
        return token >= all_from && token + Cta::TOKENS <= all_to;
    }

    // How many keys from here on some row of the team sees, if any.
    __device__ __forceinline__ int32_t num_seen(int32_t token) const { return end - token; }

    template <typename Params>
    __device__ __forceinline__ void load(const Params&) {}

    template <int TILES, typename Exists>
    __device__ __forceinline__ void hide(float (&s)[TILES][4], int32_t token, Exists exists) const {
        uint32_t first[2], num[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            first[h] = token + threadIdx.x % 4 * 2 - from[h];
            num[h] = max(to[h] - from[h], 0);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const bool there[2] = {exists(tile, 0), exists(tile, 1)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool seen = first[i / 2] + tile * 8 + i % 2 < num[i / 2];
                s[tile][i] = seen && there[i % 2] ? s[tile][i] : NO_KEY;
            }
        }
    }
};

template <typename Cta>
struct TeamSight<Cta, true> {
    static constexpr int WORDS = Cta::TOKENS / 32;
    static constexpr int STEPS = MASK_STEP / Cta::TOKENS;  // of an entry

    int32_t first_entry;       // of the tile
    int32_t query[2];          // of the tile, those of this lane's rows
    int32_t entry = 0;         // of the step
    uint32_t words[2][WORDS];  // of the step

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

    // Loads the step's bits, before its scores are there.
    template <typename Params>
    __device__ __forceinline__ void load(const Params& p) {
        const MaskTiles& mask = p.work.mask;
        const int32_t step = entry >> 4;
        const int64_t first = int64_t{first_entry + step / STEPS} * mask.tile_queries;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint4 x = {};
            if ((entry & ALL_CLASSES) != 0) {  // else no key is seen
                const uint32_t* from = mask.words + (first + query[h]) * MASK_WORDS;
                if constexpr (WORDS == MASK_WORDS) {
                    x = ld_global_16(from);
                } else {
                    static_assert(WORDS == 2, "words of a half");
                    const uint2 pair = *reinterpret_cast<const uint2*>(from + step % STEPS * WORDS);
                    x.x = pair.x, x.y = pair.y;
                }
            }
            words[h][0] = x.x;
            words[h][1] = x.y;
            if constexpr (WORDS == MASK_WORDS) {
                words[h][2] = x.z;
                words[h][3] = x.w;
            }
        }
    }

    // Hides the scores of keys that a row does not see, or of keys that do not exist.
    template <int TILES, typename Exists>
    __device__ __forceinline__ void hide(float (&s)[TILES][4], int32_t, Exists exists) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const bool there[2] = {exists(tile, 0), exists(tile, 1)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t bits = words[i / 2][tile / 4] >> threadIdx.x % 4 * 2;
                const bool seen = bits >> (tile % 4 * 8 + i % 2) & 1;
                s[tile][i] = seen && there[i % 2] ? s[tile][i] : NO_KEY;
            }
        }
    }
};

}  // namespace cukv
