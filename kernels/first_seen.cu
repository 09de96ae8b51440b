// first_seen -- where the window of each row of a cascade begins in one of the upper levels.
//
//   first_seen[r] = position - window_left, counted from the level's first key of r's request
//   position      = len[level] + len[level + 1] + ... + len[leaf] - qo_len + i
//
// for the i-th of the qo_len rows of r's leaf: positions count over the concatenation of all
// levels, of which those above the level come off. What the level below has, if it is an upper one,
// holds the rest of the sum. One thread per row. Bound by latency: two binary searches. Any
// contents of the index arrays are safe: a row that is no request's has no keys there.
// Host: cukv/_cascade.py Windows.update       Reference: cukv/reference.py cascade
#include "common/paged.cuh"

namespace cukv {

// The rows of q of a level's requests, and their keys.
struct Level {
    PageTable table;
    Index qo_indptr;  // [batch_size + 1]

    // The request that a row belongs to; -1: none.
    __device__ __forceinline__ int64_t request_of(int64_t row) const {
        const int64_t end = upper_bound(qo_indptr, table.batch_size + 1, row);
        return end <= table.batch_size ? end - 1 : -1;
    }

    __device__ __forceinline__ int64_t kv_len(int64_t request_idx) const {
        return request_idx < 0 ? 0 : table.kv_len(table.request(request_idx));
    }
};

struct FirstSeenParams {
    Level level;
    Level leaf;            // not read if `below` is given
    const int32_t* below;  // [num_rows] first_seen of the next level, or null: that is the leaf
    int32_t* first_seen;   // [num_rows], written
    int64_t num_rows;
    int64_t window_left;
};

static_assert(
    sizeof(FirstSeenParams) == PARAMS_BYTES, "host and device disagree on the parameters");

__global__ void first_seen(const __grid_constant__ FirstSeenParams p) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= p.num_rows) {
        return;
    }
    int64_t first = 0;
    if (p.below != nullptr) {
        first = p.below[row];
    } else {
        const int64_t request_idx = p.leaf.request_of(row);
        const int64_t end_row = request_idx < 0 ? row : p.leaf.qo_indptr[request_idx + 1];
        first = p.leaf.kv_len(request_idx) - (end_row - row) - p.window_left;
    }
    p.first_seen[row] = static_cast<int32_t>(first + p.level.kv_len(p.level.request_of(row)));
}

}  // namespace cukv
