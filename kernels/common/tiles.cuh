// Requests as tiles of packed query rows: what a work list is made from.
#pragma once
#include "common/work.cuh"

namespace cukv {

// The work list of a kernel, and how that kernel cuts its work.
struct TileList {
    WorkList work;
    int32_t row_bits;  // log2 of the packed rows of a tile
    int32_t min_rows;  // it serves requests of min_rows to max_rows packed rows
    int32_t max_rows;
    int32_t step_bits;          // log2 of the tokens of a warp's step
    int32_t round_bits;         // log2 of the steps that a CTA's warps take side by side
    int32_t item_cost;          // steps that an item costs beside its keys
    int32_t cost_bits;          // log2 of the steps of a unit of cost
    int32_t cut_cost;           // steps that tiles cut at both ends of a part cost it; 0: little
    int32_t fixed_item_tokens;  // where items are fixed
    int32_t max_fixed_items;    // of a request, where items are fixed

    __device__ __forceinline__ int32_t rows_per_tile() const { return 1 << row_bits; }
};

constexpr int64_t MAX_TOKENS = 1 << 30;  // of a request

__device__ __forceinline__ int32_t clamp(int64_t x, int32_t low, int32_t high) {
    return static_cast<int32_t>(min(max(x, int64_t{low}), int64_t{high}));
}

// A request's rows and keys as the work list may name them: inside q and `indices`, whatever the
// index arrays hold. ONE_TILE: none has more than one tile.
template <bool ONE_TILE>
struct RequestRows {
    int32_t first_page;
    int32_t first_q_row;
    int32_t kv_len;
    int32_t qo_len;
    int32_t packed_rows;
    int32_t num_tiles;  // of the list; 0 where another list serves the request

    // Params: table, qo_indptr, group, num_q_rows.
    template <typename Params>
    __device__ __forceinline__
    RequestRows(const Params& p, const TileList& list, int32_t request_idx) {
        const int32_t num_indices = static_cast<int32_t>(p.table.indices.size);
        first_page = clamp(p.table.indptr[request_idx], 0, num_indices);
        const int64_t full_pages =
            clamp(p.table.indptr[request_idx + 1], first_page, num_indices) - first_page - 1;
        const int32_t page_size = p.table.page_divisor.divisor;
        const Index& lens = p.table.last_page_len;  // not given: last pages are full
        const int32_t last = lens.given() ? clamp(lens[request_idx], 0, page_size) : page_size;
        kv_len = full_pages < 0 ? 0 : min(full_pages * p.table.page_size + last, MAX_TOKENS);
        first_q_row = request_idx;
        qo_len = 1;
        if (p.qo_indptr.given()) {
            first_q_row = clamp(p.qo_indptr[request_idx], 0, p.num_q_rows);
            qo_len = clamp(p.qo_indptr[request_idx + 1], first_q_row, p.num_q_rows) - first_q_row;
        }
        packed_rows = qo_len * p.group.divisor;
        num_tiles = 1;
        if constexpr (!ONE_TILE) {
            const bool served = packed_rows >= list.min_rows && packed_rows <= list.max_rows;
            num_tiles = served ? (packed_rows + list.rows_per_tile() - 1) >> list.row_bits : 0;
        }
    }
};

}  // namespace cukv
