// gather -- copy the tokens of every request out of its pages, packed one request after another.
//
//   b   = request of row i: token_indptr[b] <= i < token_indptr[b + 1]
//   pos = i - token_indptr[b],  page = indices[table.indptr[b] + pos / page_size]
//   out[i, h, :] = cache[page, pos % page_size, h, :]      0 where the table names no page
//
// Bound by HBM: every row read once and written once.
// Host: cukv/paged.py PagedKVCache.gather, cukv/mla.py MLAPagedCache.gather
// Reference: cukv/reference.py gather
#include "common/rows.cuh"

namespace cukv {

struct GatherParams {
    PageTable table;
    Index token_indptr;  // [batch_size + 1], tokens
    char* out;           // [nnz, num_kv_heads, head_dim], written
    Scale scale;
    Pages cache;
    Rows rows;
    int64_t nnz;
};

static_assert(sizeof(GatherParams) == PARAMS_BYTES, "host and device disagree on the parameters");

constexpr int64_t PADDING = NO_SLOT + 1;  // a row past the last request: left as it is

__device__ __forceinline__ int64_t find_slot(const GatherParams& p, int64_t row) {
    const int64_t request_idx = upper_bound(p.token_indptr, p.token_indptr.size, row) - 1;
    if (request_idx < 0 || request_idx >= p.table.batch_size) {
        return PADDING;
    }
    const int64_t position = row - p.token_indptr[request_idx];
    return p.cache.offset(p.table.slot(p.table.request(request_idx), position));
}

template <typename FROM, typename TO, int VEC>
__global__ void __launch_bounds__(256) gather(const __grid_constant__ GatherParams p) {
    __shared__ int64_t slots[MAX_ROWS_PER_CTA];
    // 1 which rows, and where they live
    const RowRange range(p.nnz, p.rows, blockIdx.x);
    for (int i = threadIdx.x; i < range.num; i += blockDim.x) {
        slots[i] = find_slot(p, range.first + i);
    }
    __syncthreads();  // all slots are in smem

    // 2 copy them
    const float scale = p.scale.get();
    const auto load = [&](const Place& place) {
        const int64_t slot = slots[place.local_row];
        if (slot == NO_SLOT || slot == PADDING) {
            return Vec<FROM, VEC>{};
        }
        const int64_t offset = slot + place.offset<FROM, VEC>(p.cache.head_stride);
        return load_vec<FROM, VEC>(p.cache.base + offset);
    };
    const auto store = [&](const Place& place, const Vec<FROM, VEC>& x) {
        if (slots[place.local_row] == PADDING) {
            return;
        }
        char* row = p.out + (range.first + place.local_row) * p.rows.row_stride;
        store_vec(
            row + place.offset<TO, VEC>(p.rows.head_stride),
            convert<FROM, TO, VEC>(x, [=](float value) { return value * scale; }));
    };
    move_rows<Vec<FROM, VEC>>(p.rows, range.num, load, store);
}

}  // namespace cukv
