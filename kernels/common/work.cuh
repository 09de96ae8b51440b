// The work list of an attention call: which CTA attends from which query rows to which keys.
//
//   tile   up to rows_per_tile packed query rows of a request: row = q_row * group_size + head
//          within its group
//   item   one run of a tile's keys, worked on by one CTA per KV head
//   part   items [part_begin[g], part_end[g]): those of the g-th CTA of each KV head
//
// A tile of one item is finished where it is computed. Of a tile of several, each item leaves its
// state in a slot, and whoever takes the last ticket merges the slots in the order of the keys; but
// items of what a cascade's leaves share leave their states to the leaves (common/levels.cuh).
#pragma once
#include "common/mask.cuh"
#include "common/paged.cuh"
#include "common/ptx.cuh"

namespace cukv {

// All that a CTA needs to know of an item, so that nothing else is read before the first keys.
struct alignas(16) Item {
    int32_t first_page;   // the request's pages are indices[first_page], ...
    int32_t first_q_row;  // of q, o and lse, unless common/levels.cuh says otherwise
    int32_t diagonal;     // kv_len - qo_len: position of the request's first query
    int32_t first_row;    // packed rows [first_row, first_row + num_rows) of the request
    int32_t num_rows;
    int32_t first_token;  // keys [first_token, end_token); of the tile's listed keys under a mask
    int32_t end_token;
    uint16_t item_idx;   // among the tile's
    uint16_t num_items;  // of the tile
    int32_t first_slot;  // of item 0, whose ticket is the tile's; -1: there is no other item
    int32_t next_slot;   // of item 1; those of items 2, 3, ... are behind it
    union {
        int32_t mask_entry;  // of the tile's first, under a mask
        int32_t is_left;     // of a cascade: whether another list has the keys of the leaf
    };

    __device__ __forceinline__ int32_t slot(int32_t i) const {
        return i == 0 ? first_slot : next_slot + i - 1;
    }
};

// Loads an item here and now, not where the compiler finds that it is needed first.
__device__ __forceinline__ Item load_item(const Item* from) {
    static_assert(sizeof(Item) == 48, "three loads");
    struct Words {
        uint4 x[3];
    } words;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        words.x[i] = ld_global_16(reinterpret_cast<const char*>(from) + 16 * i);
    }
    return __builtin_bit_cast(Item, words);
}

// The same past the L1.
__device__ __forceinline__ Item load_item_past_l1(const Item* from) {
    struct Words {
        uint4 x[sizeof(Item) / 16];
    } words;
#pragma unroll
    for (int i = 0; i < sizeof(Item) / 16; ++i) {
        words.x[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i);
    }
    return __builtin_bit_cast(Item, words);
}

// Starts copying an item, by a warp, to where only this warp reads it.
__device__ __forceinline__ void copy_item(Item& to, const Item* from) {
    const int lane_idx = tid_x() % WARP_SIZE;
    if (lane_idx < int{sizeof(Item) / 16}) {
        cp_async_16(
            smem_address(&to) + lane_idx * 16, reinterpret_cast<const char*>(from) + lane_idx * 16,
            16);
    }
    cp_async_commit_group();
}

struct WorkList {
    Item* items;          // [max_items]; those between parts that are no part's have no rows
    Item* first_items;    // [num_parts] copies, so that a CTA starts with one look-up
    int32_t* part_begin;  // [num_parts]
    int32_t* part_end;    // [num_parts]; no more than part_begin where a part has no items
    int32_t* tickets;     // [max_slots + 2, num_kv_heads], zero: of slots, and behind them counters
    float* states;        // [max_slots, num_kv_heads, rows_per_tile, 2] maximum and denominator
    float* sums;          // [max_slots, num_kv_heads, rows_per_tile, head_dim_vo] weighted sums;
                          // of latent rows in half of that room (common/latent_slots.cuh)
    int32_t max_items;
    int32_t max_slots;
    int32_t num_parts;
    int32_t num_kv_heads;
    MaskTiles mask;

    // Counters of kernels that deal items while they run: of items, and of CTAs that got no more.
    __device__ __forceinline__ int32_t* num_dealt() const {
        return tickets + int64_t{max_slots} * num_kv_heads;
    }
    __device__ __forceinline__ int32_t* num_finished() const { return num_dealt() + num_kv_heads; }
};

}  // namespace cukv
