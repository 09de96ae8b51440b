// mask_indptr -- where each request's mask starts among all requests' elements.
//
//   indptr[0] = 0,  indptr[b + 1] = indptr[b] + qo_len[b] * kv_len[b]
//
// One CTA, neighbouring threads on neighbouring requests. A negative length counts as 0.
// Host: cukv/masks.py RaggedMask.indptr       Reference: cukv/reference.py mask_indptr
#include "common/scan.cuh"

namespace cukv {

struct MaskIndptrParams {
    Index qo_indptr;  // [batch_size + 1], rows
    Index kv_indptr;  // [batch_size + 1], tokens
    Index indptr;     // [batch_size + 1], written, elements
};

static_assert(
    sizeof(MaskIndptrParams) == PARAMS_BYTES, "host and device disagree on the parameters");

__global__ void __launch_bounds__(SCAN_THREADS)
    mask_indptr(const __grid_constant__ MaskIndptrParams p) {
    __shared__ ScanSmem smem;
    prefix_sum(p.indptr, p.qo_indptr.size - 1, smem, [&](int64_t request_idx) {
        const int64_t qo_len = p.qo_indptr[request_idx + 1] - p.qo_indptr[request_idx];
        const int64_t kv_len = p.kv_indptr[request_idx + 1] - p.kv_indptr[request_idx];
        return qo_len > 0 && kv_len > 0 ? qo_len * kv_len : 0;
    });
}

}  // namespace cukv
