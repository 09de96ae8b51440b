// page_indptr -- the CSR structure of a page table, from the lengths of its requests.
//
//   pages[b]         = ceil(seq_lens[b] / page_size)
//   indptr[0]        = 0,  indptr[b + 1] = indptr[b] + pages[b]
//   last_page_len[b] = seq_lens[b] > 0 ? (seq_lens[b] - 1) % page_size + 1 : 0
//
// One CTA, neighbouring threads on neighbouring requests. Bound by latency.
// Host: cukv/page_table.py PageTable.from_seq_lens       Reference: cukv/reference.py page_indptr
#include "common/scan.cuh"

namespace cukv {

struct PageIndptrParams {
    Index seq_lens;       // [batch_size], tokens
    Index indptr;         // [batch_size + 1], written, counts pages
    Index last_page_len;  // [batch_size], written, tokens
    int64_t page_size;
};

static_assert(
    sizeof(PageIndptrParams) == PARAMS_BYTES, "host and device disagree on the parameters");

__global__ void __launch_bounds__(SCAN_THREADS)
    page_indptr(const __grid_constant__ PageIndptrParams p) {
    __shared__ ScanSmem smem;
    prefix_sum(p.indptr, p.seq_lens.size, smem, [&](int64_t request_idx) {
        const int64_t len = p.seq_lens[request_idx];
        const int64_t pages = len > 0 ? (len - 1) / p.page_size + 1 : 0;
        p.last_page_len.store(request_idx, len - (pages > 0 ? (pages - 1) * p.page_size : len));
        return pages;
    });
}

}  // namespace cukv
