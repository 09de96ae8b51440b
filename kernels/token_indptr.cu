// token_indptr -- prefix sum of the tokens of every request of a CSR page table.
//
//   token_indptr[0] = 0,  token_indptr[b + 1] = token_indptr[b] + seq_lens[b]
//
// One CTA, neighbouring threads on neighbouring requests. Bound by latency: a round of 1024
// requests is one load and one scan.
// Host: cukv/page_table.py PageTable.token_indptr       Reference: cukv/reference.py token_indptr
#include "common/paged.cuh"
#include "common/scan.cuh"

namespace cukv {

struct TokenIndptrParams {
    PageTable table;
    Index token_indptr;  // [batch_size + 1], written
};

static_assert(
    sizeof(TokenIndptrParams) == PARAMS_BYTES, "host and device disagree on the parameters");

__global__ void __launch_bounds__(SCAN_THREADS)
    token_indptr(const __grid_constant__ TokenIndptrParams p) {
    __shared__ ScanSmem smem;
    prefix_sum(p.token_indptr, p.table.batch_size, smem, [&](int64_t request_idx) {
        const int64_t len = p.table.kv_len(p.table.request(request_idx));
        return len > 0 ? len : 0;  // a broken table must not make the sum fall
    });
}

}  // namespace cukv
