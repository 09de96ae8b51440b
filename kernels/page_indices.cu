// page_indices -- the page ids of a CSR page table, from the rows of a dense block table.
//
//   indices[indptr[b] + i] = block_table[b, i]  for i < indptr[b + 1] - indptr[b],  -1 past the end
//
// One thread per entry of `indices`, which finds its request in indptr. Bound by launch.
// Host: cukv/page_table.py PageTable.from_block_table       Reference: cukv/reference.py page_indices
#include "common/index.cuh"

namespace cukv {

struct PageIndicesParams {
    Index indptr;             // [batch_size + 1], counts pages
    Index indices;            // [capacity], written
    const void* block_table;  // [batch_size, width], page ids
    int64_t row_stride;       // bytes
    int64_t entry_stride;     // bytes
    int64_t width;            // pages
    int64_t entry_width;      // bytes: 4 or 8
};

static_assert(
    sizeof(PageIndicesParams) == PARAMS_BYTES, "host and device disagree on the parameters");

__global__ void page_indices(const __grid_constant__ PageIndicesParams p) {
    const int64_t entry = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (entry >= p.indices.size) {
        return;
    }
    const int64_t batch_size = p.indptr.size - 1;
    const int64_t request_idx = upper_bound(p.indptr, batch_size + 1, entry) - 1;
    int64_t page = -1;
    if (request_idx >= 0 && request_idx < batch_size) {
        const int64_t i = entry - p.indptr[request_idx];
        const char* row = static_cast<const char*>(p.block_table) + request_idx * p.row_stride;
        if (i >= 0 && i < p.width) {
            page = Index{row, p.entry_stride, p.width, p.entry_width}[i];
        }
    }
    p.indices.store(entry, page);
}

}  // namespace cukv
