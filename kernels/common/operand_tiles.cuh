// Tiles of rows in shared memory as a warpgroup's products read them, and how steps of keys get there.
//
// Rows are swizzled as common/swizzle.cuh says, 64 columns (128 bytes) at a time. Where 8 rows of all
// columns lie together, that is its layout; a tile that one copy brings has all rows of 64 columns
// together instead.
#pragma once
#include "common/ptx_sm90.cuh"
#include "common/swizzle.cuh"
#include "common/work.cuh"

namespace cukv {

constexpr int SWIZZLED_COLUMNS = 64;  // of 16-bit elements

template <int ROWS, int COLUMNS, bool GROUPED>
struct OperandTile {
    static_assert(COLUMNS % SWIZZLED_COLUMNS == 0, "columns are swizzled 64 at a time");
    static constexpr int BYTES = ROWS * COLUMNS * 2;
    static constexpr int GROUP_BYTES = GROUPED ? COLUMNS / 64 * 1024 : 1024;  // to the next 8 rows
    static constexpr int SPAN_BYTES = GROUPED ? 1024 : ROWS * 128;  // to the next 64 columns

    // Bytes from the tile to a 16-byte chunk of a row.
    static __device__ __forceinline__ int offset(int row, int chunk) {
        return (row >> 3) * GROUP_BYTES + (chunk >> 3) * SPAN_BYTES + (row & 7) * 128 +
               (((chunk ^ row) & 7) << 4);
    }

    // The tile's descriptor. Addresses in it are in units of 16 bytes; a cluster's shared memory has
    // longer addresses than the field.
    static __device__ __forceinline__ uint64_t descriptor(uint32_t tile) {
        constexpr uint64_t SWIZZLE_128 = uint64_t{1} << 62;
        return SWIZZLE_128 | uint64_t{GROUP_BYTES >> 4} << 32 | uint64_t{SPAN_BYTES >> 4} << 16 |
               (tile & 0x3ffffu) >> 4;
    }

    // From a descriptor to that of columns [16 * k_step, 16 * (k_step + 1)), over which a product sums.
    static constexpr __device__ __forceinline__ int columns(int k_step) {
        return (k_step / 4 * SPAN_BYTES + k_step % 4 * 32) >> 4;
    }

    // From a descriptor to that of rows [16 * k_step, 16 * (k_step + 1)), over which a product sums.
    static constexpr __device__ __forceinline__ int rows(int k_step) {
        return k_step * 2 * GROUP_BYTES >> 4;
    }
};

// A place in a ring of buffers, and the parity of the phase that it is in.
template <int STAGES>
struct RingPlace {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The items of a CTA, one after the other: those of its part for one KV head, then for the next of
// its heads. gridDim.x / num_parts heads are worked on at a time.
struct ItemWalk {
    const WorkList& work;
    int32_t begin_item, end_item, item_idx;
    int32_t kv_head, heads_at_once;

    __device__ __forceinline__ explicit ItemWalk(const WorkList& work) : work(work) {
        heads_at_once = gridDim.x / work.num_parts;
        kv_head = blockIdx.x % heads_at_once;
        const int part = blockIdx.x / heads_at_once;
        begin_item = item_idx = work.part_begin[part];
        end_item = work.part_end[part];
    }

    // Gives the next item that has rows, and its head; item.num_rows is 0 when there is none.
    __device__ __forceinline__ Item next(int32_t& head) {
        Item item = {};
        while (item.num_rows == 0 && kv_head < work.num_kv_heads) {
            head = kv_head;
            if (item_idx < end_item) {
                item = load_item(work.items + item_idx++);
            } else {
                item_idx = begin_item;
                kv_head += heads_at_once;
            }
        }
        return item;
    }
};

// Steps of an item are at multiples of TOKENS, the last one first. An item without keys has one too.
template <int TOKENS>
__device__ __forceinline__ int32_t first_step(const Item& item) {
    return item.first_token & -TOKENS;
}

template <int TOKENS>
__device__ __forceinline__ int32_t last_step(const Item& item) {
    return max(item.end_token - 1, item.first_token) & -TOKENS;
}

// How a warp has steps of keys or values copied. PAGED: in pieces of 2^piece_bits tokens, which lie
// in one page each, by one lane each; else a step is consecutive rows.
template <typename Tile, int TOKENS, bool PAGED>
struct StepCopy {
    const PageTable& table;
    const Pages& cache;
    const TensorMap& map;
    int32_t head_spans;  // from a head to the next, in units of 128 bytes
    int32_t piece_bits;

    // Where this lane's piece of a step is; page max_num_pages, which does not exist, gives zeros.
    struct Piece {
        int32_t page;
        int32_t entry;
        uint32_t dropped;  // of the step, by pieces: keys of the item whose page does not exist
    };

    __device__ __forceinline__ Piece find(const Item& item, int32_t token) const {
        if constexpr (!PAGED) {
            return {};
        }
        const int32_t own = token + (threadIdx.x % WARP_SIZE << piece_bits);
        const bool wanted = own < min(item.end_token, token + TOKENS);
        const uint32_t page_idx = table.page_divisor.quotient(own);
        const int64_t id = wanted ? table.indices[item.first_page + page_idx] : -1;
        const bool found = cache.has(id);
        return {
            static_cast<int32_t>(found ? id : cache.max_num_pages),
            static_cast<int32_t>(own - page_idx * table.page_divisor.divisor),
            __ballot_sync(0xffffffffu, wanted && !found)};
    }

    // Announces the step's bytes and starts its copies.
    __device__ __forceinline__ void issue(
        char* tile,
        uint64_t& full,
        const Item& item,
        int kv_head,
        int32_t token,
        const Piece& piece) const {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        if (lane_idx == 0) {
            mbarrier_arrive_expect_tx(full, Tile::BYTES);
        }
        __syncwarp();
        const uint32_t to = smem_address(tile);
        if constexpr (!PAGED) {
            if (lane_idx == 0) {
                cp_async_bulk_tensor_3d(
                    to, map, full, 0, item.first_page + token, kv_head * head_spans);
            }
        } else if (lane_idx < TOKENS >> piece_bits) {
            cp_async_bulk_tensor_5d(
                to + (lane_idx << piece_bits) / 8 * Tile::GROUP_BYTES, map, full, 0, 0,
                kv_head * head_spans, piece.entry / 8, piece.page);
        }
    }
};

}  // namespace cukv
