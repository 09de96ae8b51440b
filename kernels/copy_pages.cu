// copy_pages -- one half of copying whole pages: out of a cache into scratch, or back into it.
//
//   to_scratch:   scratch[i] = cache[src[i]]          else: cache[dst[i]] = scratch[i]
//
// for every pair i whose src and dst are both pages. Two launches make a copy that behaves as if
// all sources were read before the first write, whatever the overlap of src and dst.
//
// Bound by HBM: every page read twice and written twice.
// Host: cukv/paged.py PagedKVCache.copy_pages, cukv/mla.py MLAPagedCache.copy_pages
// Reference: cukv/reference.py copy_pages
#include "common/rows.cuh"

namespace cukv {

struct CopyPagesParams {
    char* scratch;  // [num_pairs * page_size, num_heads, head_dim in bytes]
    Index src;      // [num_pairs], page ids
    Index dst;      // [num_pairs], page ids
    Pages cache;
    Rows rows;  // of scratch
    int64_t page_size;
    int64_t to_scratch;  // 1: read the cache, 0: write it
};

static_assert(
    sizeof(CopyPagesParams) == PARAMS_BYTES, "host and device disagree on the parameters");

template <int BYTES>
__global__ void __launch_bounds__(256) copy_pages(const __grid_constant__ CopyPagesParams p) {
    __shared__ int64_t slots[MAX_ROWS_PER_CTA];
    // 1 which token rows of which pages
    const RowRange range(p.src.size * p.page_size, p.rows, blockIdx.x);
    for (int i = threadIdx.x; i < range.num; i += blockDim.x) {
        const int64_t row = range.first + i;
        const int64_t pair = row / p.page_size, entry = row - pair * p.page_size;
        const int64_t src = p.src[pair], dst = p.dst[pair];
        const bool valid = p.cache.has(src) && p.cache.has(dst);
        slots[i] = p.cache.offset({valid ? (p.to_scratch ? src : dst) : -1, entry});
    }
    __syncthreads();  // all slots are in smem

    // 2 copy them
    using Bytes = Vec<uint8_t, BYTES>;
    const auto in_scratch = [&](const Place& place) {
        return p.scratch + (range.first + place.local_row) * p.rows.row_stride +
               place.offset<uint8_t, BYTES>(p.rows.head_stride);
    };
    const auto in_cache = [&](const Place& place) {
        return p.cache.base + slots[place.local_row] +
               place.offset<uint8_t, BYTES>(p.cache.head_stride);
    };
    const auto load = [&](const Place& place) {
        const bool nothing = slots[place.local_row] == NO_SLOT;
        const char* from = p.to_scratch ? in_cache(place) : in_scratch(place);
        return nothing ? Bytes{} : load_vec<uint8_t, BYTES>(from);
    };
    const auto store = [&](const Place& place, const Bytes& x) {
        if (slots[place.local_row] != NO_SLOT) {
            store_vec(p.to_scratch ? in_scratch(place) : in_cache(place), x);
        }
    };
    move_rows<Bytes>(p.rows, range.num, load, store);
}

}  // namespace cukv
