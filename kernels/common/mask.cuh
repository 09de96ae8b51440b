// Custom masks as attention kernels read them: by tiles of the work list, classified once.
//
//   step   MASK_STEP keys of a tile of packed rows, from a multiple of MASK_STEP on
//   class  of either half of a step: EMPTY (no query of the tile sees a key of it), FULL (every
//          query sees every key) or MIXED
//   entry  a step that is not empty: its number, and the classes of its halves
//
// A tile's entries lie together, in the order of its keys. The tile's *listed* keys are those of
// its entries, one step after the other: items count among these, so that empty steps cost nothing.
// The window is part of the mask; causal is not, because a mask replaces it.
//
// A step serves kernels that take 128 keys at a time and those that take less, down to 16. A tile
// of R packed rows and groups of G heads has R / G queries, so its bits are short: 16 bytes per
// query and step, whatever the mask looked like.
#pragma once
#include "common/types.cuh"

namespace cukv {

constexpr int MASK_STEP = 128;            // keys
constexpr int MASK_HALF = MASK_STEP / 2;  // keys that share a class
constexpr int MASK_WORDS = MASK_STEP / 32;

// The lowest `num` bits, for any num.
__device__ __forceinline__ uint32_t low_bits(int32_t num) {
    return __funnelshift_lc(0xffffffffu, 0, max(num, 0));
}

enum MaskClass : int32_t { EMPTY = 0, MIXED = 1, FULL = 2 };

constexpr int32_t ALL_CLASSES = 15;  // of an entry
constexpr int32_t BOTH_FULL = FULL << 2 | FULL;
constexpr int32_t BOTH_MIXED = MIXED << 2 | MIXED;

// The entry of a half, as if a step were as long: its number among halves, and its class twice.
__device__ __forceinline__ int32_t half_entry(int32_t entry, int half_idx) {
    const int32_t own = entry >> 2 * half_idx & 3;
    return ((entry >> 4) * 2 + half_idx) << 4 | own << 2 | own;
}

// Of the keys around a listed one of `entry` that share its class.
__device__ __forceinline__ int32_t class_of(int32_t entry, uint32_t listed) {
    return entry >> listed / MASK_HALF % 2 * 2 & 3;
}

struct alignas(8) MaskTile {  // read and written as one
    int32_t first_entry;
    int32_t num_tokens;  // listed keys; the last step of a request may be short
};

// Of a work list. entries is null where a call has no mask.
struct MaskTiles {
    int32_t* entries;  // [max_entries] step << 4 | class of the second half << 2 | of the first
    uint32_t* words;   // [max_entries, tile_queries, MASK_WORDS] bit j: key j of the step is seen
    MaskTile* tiles;   // [max_tiles], see first_tile
    int32_t max_entries;
    int32_t max_tiles;
    int32_t tile_queries;  // that a tile has at most
    int32_t row_bits;      // log2 of the packed rows of a tile

    __device__ __forceinline__ bool given() const { return entries != nullptr; }

    // Where the tiles of a request are. Not a prefix sum, so that a thread finds them alone; each
    // request may have one tile more than its rows fill.
    __device__ __forceinline__ int32_t
    first_tile(int32_t request_idx, int32_t first_q_row, uint32_t group_size) const {
        return static_cast<int32_t>(int64_t{first_q_row} * group_size >> row_bits) + request_idx;
    }

    // The entry of a listed key.
    __device__ __forceinline__ int32_t entry_of(int32_t first_entry, int32_t listed) const {
        return entries[first_entry + listed / MASK_STEP];
    }

    // The position of a listed key within its request.
    __device__ __forceinline__ int32_t position(int32_t first_entry, int32_t listed) const {
        return (entry_of(first_entry, listed) >> 4) * MASK_STEP + listed % MASK_STEP;
    }

    // The word of the tile's first query that has the bit of a listed key of `entry`, bit
    // `listed % 32`; those of the other queries are MASK_WORDS further on each.
    __device__ __forceinline__ const uint32_t* word(
        int32_t first_entry, int32_t entry, int32_t listed) const {
        const int64_t row = int64_t{first_entry + (entry >> 4)} * tile_queries;
        return words + row * MASK_WORDS + listed / 32 % MASK_WORDS;
    }
};

}  // namespace cukv
