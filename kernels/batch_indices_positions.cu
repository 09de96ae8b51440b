// batch_indices_positions -- request and token index of every appended row.
//
//   batch_indices[t] = b  where  append_indptr[b] <= t < append_indptr[b + 1]
//   positions[t]     = t + seq_lens[b] - append_indptr[b + 1]
//
// Rows at or past append_indptr[-1] get request -1 and position 0. One warp per row.
// Host: cukv/positions.py batch_indices_positions  Reference: cukv/reference.py batch_indices_positions
#include "common/index.cuh"

namespace cukv {

struct BatchIndicesPositionsParams {
    Index append_indptr;  // [batch_size + 1], rows
    Index seq_lens;       // [batch_size], tokens, the appended rows included
    Index batch_indices;  // [nnz], written
    Index positions;      // [nnz], written, tokens
};

static_assert(
    sizeof(BatchIndicesPositionsParams) == PARAMS_BYTES,
    "host and device disagree on the parameters");

__global__ void batch_indices_positions(const __grid_constant__ BatchIndicesPositionsParams p) {
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP_SIZE;
    if (row >= p.batch_indices.size) {
        return;
    }
    const int64_t batch_size = p.seq_lens.size;
    const int64_t request_idx = warp_upper_bound(p.append_indptr, batch_size + 1, row) - 1;
    if (threadIdx.x % WARP_SIZE != 0) {
        return;
    }
    const bool found = request_idx >= 0 && request_idx < batch_size;
    p.batch_indices.store(row, found ? request_idx : -1);
    p.positions.store(
        row, found ? row + p.seq_lens[request_idx] - p.append_indptr[request_idx + 1] : 0);
}

}  // namespace cukv
