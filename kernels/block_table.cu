// block_table -- the pages of every request as one row of a dense table, padded with -1.
//
//   table[b, i] = indices[indptr[b] + i]  for i < pages[b],  -1 beyond
//
// One thread per entry of the table. Bound by HBM: the table once, the indices once.
// Host: cukv/page_table.py PageTable.block_table       Reference: cukv/reference.py block_table
#include "common/paged.cuh"

namespace cukv {

struct BlockTableParams {
    PageTable table;
    Index block_table;  // [batch_size * width], written
    int64_t width;      // pages
};

static_assert(
    sizeof(BlockTableParams) == PARAMS_BYTES, "host and device disagree on the parameters");

__global__ void block_table(const __grid_constant__ BlockTableParams p) {
    const int64_t entry = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (entry >= p.block_table.size) {
        return;
    }
    const int64_t request_idx = entry / p.width, i = entry % p.width;
    p.block_table.store(entry, p.table.page_id(p.table.request(request_idx), i));
}

}  // namespace cukv
