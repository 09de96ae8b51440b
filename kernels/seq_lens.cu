// seq_lens -- tokens of every request of a CSR page table.
//
//   pages[b]    = indptr[b + 1] - indptr[b]
//   seq_lens[b] = pages[b] > 0 ? (pages[b] - 1) * page_size + last_page_len[b] : 0
//
// One thread per request. Bound by launch.
// Host: cukv/page_table.py PageTable.seq_lens       Reference: cukv/reference.py seq_lens
#include "common/paged.cuh"

namespace cukv {

struct SeqLensParams {
    PageTable table;
    Index seq_lens;  // [batch_size], written
};

static_assert(sizeof(SeqLensParams) == PARAMS_BYTES, "host and device disagree on the parameters");

__global__ void seq_lens(const __grid_constant__ SeqLensParams p) {
    const int64_t request_idx = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (request_idx < p.table.batch_size) {
        p.seq_lens.store(request_idx, p.table.kv_len(p.table.request(request_idx)));
    }
}

}  // namespace cukv
