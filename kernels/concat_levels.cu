// concat_levels -- the requests of all levels of a cascade as those of one batch.
//
//   request b of level l         is request first_request[l] + b
//   its pages                    are indices[first_page[l] + indptr[b]], ...
//   its rows                     are rows first_row[l] + qo_indptr[b], ...
//   row r of level l, so row v = first_row[l] + r, attends from q[row_order[r]]
//   first_seen[v]                = position - window_left, counted from the level's first key
//   position                     = len[l] + len[l + 1] + ... + len[leaf] - qo_len + i
//
// for the i-th of the qo_len rows of r's leaf: positions count over the concatenation of all
// levels, of which those above the level come off. Between the requests of two levels is one more,
// from the end of the one to the start of the other, which has no rows: rows of a level lie before
// those of the level above it. One thread per entry of each array, in levels from the leaves up; of
// many levels so many at a time. Bound by latency: two binary searches a level where there is a
// window. Any contents of the index arrays are safe: entries stay within their level, ids that are
// not int32 become -1, and a row that is no request's has no keys.
// Host: cukv/_cascade.py LevelBatch.update       Reference: cukv/reference.py cascade
#include "common/paged.cuh"
#include "common/ptx.cuh"
#include "common/softmax.cuh"

namespace cukv {

constexpr int32_t INT32_LARGEST = 0x7fffffff;

__device__ __forceinline__ int32_t clamp_to(int64_t x, int64_t low, int64_t high) {
    return static_cast<int32_t>(min(max(x, low), high));
}

// A level, and where it begins among all.
struct Level {
    PageTable table;
    Index qo_indptr;  // [batch_size + 1]
    int32_t first_page;
    int32_t first_request;
    int32_t first_row;

    // The request that a row belongs to; -1: none.
    __device__ __forceinline__ int64_t request_of(int64_t row) const {
        const int64_t end = upper_bound(qo_indptr, table.batch_size + 1, row);
        return end <= table.batch_size ? end - 1 : -1;
    }

    __device__ __forceinline__ int64_t kv_len(int64_t request_idx) const {
        return request_idx < 0 ? 0 : table.kv_len(table.request(request_idx));
    }
};

constexpr int AT_ONCE = 8;

struct ConcatLevelsParams {
    Level levels[8];  // AT_ONCE that follow each other, or fewer, from the leaves up
    Index row_order;  // [num_rows] or not given: each row is its own
    int32_t* indptr;  // all that follow are written, for all levels
    int32_t* indices;
    int32_t* last_page_len;
    int32_t* qo_indptr;
    int32_t* q_rows;       // [num_levels, num_rows]
    int32_t* o_rows;       // [num_rows] -1 where row_order names no row; null without row_order
    int32_t* first_seen;   // [num_levels, num_rows], or null: there is no window
    float* lse;            // [num_states], those above the leaves: they become -inf
    const int32_t* below;  // [num_rows] first_seen of the level below these; null: there is none
    int64_t num_states;
    int64_t num_rows;
    int64_t num_q_rows;
    int64_t window_left;
    int32_t num_levels;
};

static_assert(
    sizeof(ConcatLevelsParams) == PARAMS_BYTES, "host and device disagree on the parameters");
static_assert(sizeof(ConcatLevelsParams::levels) == AT_ONCE * sizeof(Level), "levels at once");

__device__ __forceinline__ void copy_entry(
    const ConcatLevelsParams& p, const Level& level, int64_t i) {
    const Index& pages = level.table.indices;
    const int64_t batch_size = level.table.batch_size;
    if (i < pages.size) {
        const int64_t id = pages[i];
        p.indices[level.first_page + i] = id == static_cast<int32_t>(id) ? id : -1;
    }
    if (i <= batch_size) {
        const int64_t request = level.first_request + i;
        const Index& lens = level.table.last_page_len;
        p.indptr[request] = level.first_page + clamp_to(level.table.indptr[i], 0, pages.size);
        p.qo_indptr[request] = level.first_row + clamp_to(level.qo_indptr[i], 0, p.num_rows);
        p.last_page_len[request] = i < batch_size ? clamp_to(lens[i], 0, INT32_LARGEST) : 0;
    }
}

// Which row of q a row is, and where its window begins, in these levels.
__device__ __forceinline__ void find_row(const ConcatLevelsParams& p, int64_t row) {
    const bool is_given = p.row_order.given() && row < p.row_order.size;
    const int64_t q_row = is_given ? p.row_order[row] : row;
    if (p.o_rows != nullptr) {
        p.o_rows[row] = is_given && q_row >= 0 && q_row < p.num_q_rows ? q_row : -1;
    }
    int64_t first = 0;
    if (p.first_seen != nullptr) {
        const Level& leaf = p.levels[0];
        if (p.below != nullptr) {
            first = p.below[row];
        } else {
            const int64_t request_idx = leaf.request_of(row);
            const int64_t end_row = request_idx < 0 ? row : leaf.qo_indptr[request_idx + 1];
            first = row - end_row - p.window_left;
        }
    }
    for (int32_t i = 0; i < p.num_levels; ++i) {
        const Level& level = p.levels[i];
        const int64_t at = level.first_row + row;
        p.q_rows[at] = clamp_to(q_row, 0, p.num_q_rows - 1);
        if (p.first_seen != nullptr) {
            first += level.kv_len(level.request_of(row));
            p.first_seen[at] = clamp_to(first, -INT32_LARGEST, INT32_LARGEST);
        }
    }
}

__global__ void concat_levels(const __grid_constant__ ConcatLevelsParams p) {
    griddepcontrol_wait();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (int32_t level = 0; level < p.num_levels; ++level) {
        copy_entry(p, p.levels[level], i);
    }
    if (i < p.num_rows) {
        find_row(p, i);
    }
    if (i < p.num_states) {
        p.lse[i] = NO_KEY;
    }
    griddepcontrol_launch_dependents();
}

}  // namespace cukv
