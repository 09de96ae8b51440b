// byte_indptr -- where each segment's bits start, in bytes.
//
//   byte_indptr[0] = 0,  byte_indptr[s + 1] = byte_indptr[s] + ceil(len[s] / 8),
//   len[s] = indptr[s + 1] - indptr[s]
//
// One CTA, neighbouring threads on neighbouring segments. A negative length counts as 0.
// Host: cukv/bits.py segment_packbits, cukv/masks.py PackedMask.indptr
// Reference: cukv/reference.py segment_packbits
#include "common/scan.cuh"

namespace cukv {

struct ByteIndptrParams {
    Index indptr;       // [segments + 1], elements
    Index byte_indptr;  // [segments + 1], written, bytes
};

static_assert(
    sizeof(ByteIndptrParams) == PARAMS_BYTES, "host and device disagree on the parameters");

__global__ void __launch_bounds__(SCAN_THREADS)
    byte_indptr(const __grid_constant__ ByteIndptrParams p) {
    __shared__ ScanSmem smem;
    prefix_sum(p.byte_indptr, p.indptr.size - 1, smem, [&](int64_t segment) {
        const int64_t len = p.indptr[segment + 1] - p.indptr[segment];
        return len > 0 ? (len - 1) / 8 + 1 : 0;
    });
}

}  // namespace cukv
