// append -- write nnz packed rows into pages that the table already owns; find where by itself.
//
//   b     = request of row i: from indptr, from batch_indices, or i itself
//   pos   = kv_len[b] - (indptr[b + 1] - i), or positions[i], or kv_len[b] - 1
//   page  = indices[table.indptr[b] + pos / page_size],  entry = pos % page_size
//   k_cache[page, entry, h, :] = k[i, h, :],  v likewise;  rows that name no slot are skipped
//
// A CTA moves a few rows of K or of V. One warp finds their slots while the others have the first
// of their loads on the way. Rows and slots stay in the L2 as long as anything: attention reads
// the slots next, and lines that are the first to leave never make room for themselves where
// earlier kernels have filled the L2 (64 x 1024 rows then take 136.6 us, not 133.8).
// Bound by HBM: every row of K and V read once and written once; small batches by latency.
// Host: cukv/paged.py PagedKVCache.append, cukv/mla.py MLAPagedCache.append
// Reference: cukv/reference.py append
#include "common/ptx.cuh"
#include "common/rows.cuh"

namespace cukv {

struct AppendParams {
    // What each call gives:
    PageTable table;
    const char* k;        // [nnz, num_kv_heads, head_dim]
    const char* v;        // [nnz, num_kv_heads, head_dim_vo]
    Index indptr;         // [batch_size + 1] rows, or not given
    Index batch_indices;  // [nnz] with positions, or not given
    Index positions;      // [nnz], tokens
    Scale k_scale;
    Scale v_scale;
    // What calls share:
    Pages k_cache;
    Pages v_cache;
    Rows k_rows;
    Rows v_rows;
    int64_t nnz;
    int32_t k_ctas;
    int32_t v_ctas;
    float requests_per_row;  // batch_size / nnz
};

static_assert(sizeof(AppendParams) == PARAMS_BYTES, "host and device disagree on the parameters");

// Rows are guessed to be spread evenly over the requests, so that for even batches everything the
// row needs is read at once; where the guess is wrong a search follows, of each lane for its row.
__device__ __forceinline__ Slot slot_from_indptr(const AppendParams& p, int64_t row) {
    const int32_t last_request = static_cast<int32_t>(p.table.batch_size) - 1;
    const int32_t guess = __float2int_rz((row + 0.5f) * p.requests_per_row);  // saturates
    int32_t request_idx = min(guess, last_request);
    const int64_t first_row = p.indptr[request_idx];
    int64_t end_row = p.indptr[request_idx + 1];
    Request request = p.table.request(request_idx);
    if (row < first_row || row >= end_row) {
        request_idx = static_cast<int32_t>(upper_bound(p.indptr, p.table.batch_size + 1, row)) - 1;
        if (request_idx < 0 || request_idx > last_request) {
            return {-1, 0};
        }
        end_row = p.indptr[request_idx + 1];
        request = p.table.request(request_idx);
    }
    return p.table.slot(request, p.table.kv_len(request) - (end_row - row));
}

__device__ __forceinline__ Slot find_slot(const AppendParams& p, int64_t row) {
    if (p.indptr.given()) {
        return slot_from_indptr(p, row);
    }
    const bool explicit_rows = p.positions.given();
    const int64_t request_idx = explicit_rows ? p.batch_indices[row] : row;
    if (request_idx < 0 || request_idx >= p.table.batch_size) {
        return {-1, 0};
    }
    const Request request = p.table.request(request_idx);
    return p.table.slot(request, explicit_rows ? p.positions[row] : p.table.kv_len(request) - 1);
}

constexpr int SLOTS_FOUND = 1;  // barrier: all slots are in smem

template <typename FROM, typename TO, int VEC>
__device__ __forceinline__ void append_array(
    const AppendParams& p,
    const char* from_rows,
    const Rows& rows,
    const Pages& cache,
    const Scale& scale,
    int64_t cta_idx,
    int64_t* slots) {
    const RowRange range(p.nnz, rows, cta_idx);
    const int move_threads = blockDim.x - WARP_SIZE;  // the last warp finds slots
    if (threadIdx.x >= move_threads) {
        for (int i = threadIdx.x - move_threads; i < range.num; i += WARP_SIZE) {
            slots[i] = cache.offset(find_slot(p, range.first + i));
        }
        bar_sync<SLOTS_FOUND>(blockDim.x);
        return;
    }
    const auto load = [&](const Place& place) {
        const char* row = from_rows + (range.first + place.local_row) * rows.row_stride;
        const char* from = row + place.offset<FROM, VEC>(rows.head_stride);
        return load_vec_cg<FROM, VEC>(from);
    };
    const auto store = [&](const Place& place, const Vec<FROM, VEC>& x) {
        const int64_t slot = slots[place.local_row];
        if (slot == NO_SLOT) {
            return;
        }
        char* to = cache.base + slot + place.offset<TO, VEC>(cache.head_stride);
        Vec<TO, VEC> y;
        if constexpr (is_fp8<TO>) {
            const float by = scale.get();
            y = convert<FROM, TO, VEC>(x, [=](float value) { return value / by; });
        } else {  // the host refuses a scale: only fp8 pages hold scaled values
            y = convert<FROM, TO, VEC>(x, [](float value) { return value; });
        }
        store_vec_cg(to, y);
    };
    // One vector at a time: with few registers a thread the CTAs of an SM have enough on their way.
    const uint32_t num_vecs = range.num * rows.columns.divisor;
    uint32_t vec_idx = threadIdx.x;
    Vec<FROM, VEC> x;
    if (vec_idx < num_vecs) {
        x = load(Place(rows, vec_idx));
    }
    bar_sync<SLOTS_FOUND>(blockDim.x);
#pragma unroll 1
    while (vec_idx < num_vecs) {
        store(Place(rows, vec_idx), x);
        vec_idx += move_threads;
        if (vec_idx < num_vecs) {
            x = load(Place(rows, vec_idx));
        }
    }
}

// CTAs per SM that registers must allow. Copies, asked for 6, take 32 registers, and so 7 run;
// asked for 7 they spill. So do conversions, and all on sm_100a, unless asked for fewer.
template <typename FROM, typename K_TO, typename V_TO>
constexpr int MIN_CTAS = is_same<FROM, K_TO> && is_same<FROM, V_TO> && __CUDA_ARCH__ < 1000 ? 6 : 5;

template <typename FROM, typename K_TO, typename V_TO, int VEC>
__global__ void __launch_bounds__(256 + WARP_SIZE, (MIN_CTAS<FROM, K_TO, V_TO>))
    append(const __grid_constant__ AppendParams p) {
    __shared__ int64_t slots[MAX_ROWS_PER_CTA];
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    // CTAs of K and V alternate, so that both halves of a page are written close in time.
    const int32_t cta_idx = blockIdx.x, pairs = min(p.k_ctas, p.v_ctas);
    const bool paired = cta_idx < 2 * pairs;
    const bool of_k = paired ? cta_idx % 2 == 0 : p.k_ctas > p.v_ctas;
    const int32_t array_cta_idx = paired ? cta_idx / 2 : cta_idx - pairs;
    if (of_k) {
        append_array<FROM, K_TO, VEC>(p, p.k, p.k_rows, p.k_cache, p.k_scale, array_cta_idx, slots);
    } else {
        append_array<FROM, V_TO, VEC>(p, p.v, p.v_rows, p.v_cache, p.v_scale, array_cta_idx, slots);
    }
}

}  // namespace cukv
