// Keys and values of a part in two buffers, which all warps of a CTA fill and read together.
//
// Of each step a warp copies rows of its own, in three parts, each while another step is computed:
// page ids are looked up (of step n + 3 while step n is computed), rows found by them (n + 2) and
// copied (n + 1). Ids and rows come by asynchronous copies, all that a step starts as one group:
// one wait a step, and no register is held for any.
//
//   row of a step = own row i / R * R * WARPS + warp * R + i % R, of R rows that are copied at once
//
// A warp's rows are a multiple of 8 apart, if not neighbours: then a lane's addresses in a buffer,
// swizzled as they are, differ by constants.
#pragma once
#include "common/kv_ring.cuh"

namespace cukv {

// Geometry of a buffer: rows of keys, and behind them rows of values, both swizzled.
template <typename KV_, int HEAD_DIM_QK, int HEAD_DIM_VO, int TOKENS_, int WARPS_>
struct SharedRing {
    using KV = KV_;
    static constexpr int TOKENS = TOKENS_, WARPS = WARPS_, STAGES = 2, OWN_ROWS = TOKENS / WARPS;
    static constexpr int K_ROW_BYTES = HEAD_DIM_QK * sizeof(KV);
    static constexpr int V_ROW_BYTES = HEAD_DIM_VO * sizeof(KV);
    static constexpr int V_OFFSET = TOKENS * K_ROW_BYTES;  // bytes
    static constexpr int BYTES = V_OFFSET + TOKENS * V_ROW_BYTES;

    static constexpr int lanes(int row_bytes) { return row_bytes < 512 ? row_bytes / 16 : 32; }
    static constexpr int rows_at_once(int row_bytes) { return WARP_SIZE / lanes(row_bytes); }
    static constexpr int R = rows_at_once(K_ROW_BYTES < V_ROW_BYTES ? V_ROW_BYTES : K_ROW_BYTES);
    static_assert(R * WARPS % 8 == 0, "a warp's rows are swizzled alike");
    static_assert(2 * OWN_ROWS <= WARP_SIZE, "a lane finds a row of keys or of values");

    // Which row of a step a warp's own row i is.
    static __device__ __forceinline__ int row(int i) {
        return i / R * R * WARPS + tid_x() / WARP_SIZE * R + i % R;
    }

    using OwnKeys = typename UintOf<OWN_ROWS / 8>::type;
    static_assert(TOKENS == 64, "all keys of a step are a word");

    // What all warps share. Of four steps in turn, whether a row is a key: bit i of its warp.
    struct Buffers {
        alignas(1024) char bytes[STAGES][BYTES];
        alignas(16) struct {
            const char* base;  // of the KV head, in page 0
            int64_t page_stride;
            int64_t token_stride;
            int64_t max_num_pages;
        } caches[2];
        alignas(8) OwnKeys keys[4][WARPS];

        __device__ __forceinline__ uint64_t all_keys(uint32_t step) const {
            return *reinterpret_cast<const uint64_t*>(keys[step % 4]);
        }
    };

    // Keys in the order of the step: bit t, whether row t is one.
    static __device__ __forceinline__ uint64_t in_order(uint64_t all_keys) {
        uint32_t words[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = i * 32 + tid_x() % WARP_SIZE;
            const int bit = token / R % WARPS * OWN_ROWS + token / (R * WARPS) * R + token % R;
            words[i] = __ballot_sync(0xffffffffu, all_keys >> bit & 1);
        }
        return uint64_t{words[1]} << 32 | words[0];
    }

    // What a warp knows of steps to come; in shared memory because steps need all registers.
    struct Own {
        struct {
            const char* begin[2];  // of a row of keys, of a row of values
        } rows[OWN_ROWS];
        struct {
            IndexEntry page;  // that was looked up
            uint32_t entry;   // of the row within it
        } places[OWN_ROWS];
        StepPlace place;  // of the step whose ids were looked up last
    };
};

// Fills the buffers of a part. Params: table, work, k_cache, v_cache, head_dim, head_dim_vo.
template <typename Ring, bool ALIGNED, typename Params>
struct SharedLoader {
    using KV = typename Ring::KV;
    static constexpr int OWN_ROWS = Ring::OWN_ROWS;

    const Params& p;
    typename Ring::Buffers& buffers;
    typename Ring::Own& own;

    // By one thread, before any step.
    static __device__ __forceinline__ void begin(
        const Params& p, typename Ring::Buffers& buffers, int kv_head) {
        const Pages* const caches[2] = {&p.k_cache, &p.v_cache};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Pages& cache = *caches[i];
            buffers.caches[i] = {
                cache.base + kv_head * cache.head_stride, cache.page_stride, cache.token_stride,
                cache.max_num_pages};
        }
    }

    // At the first step of a part; `first` is items[first_item].
    __device__ __forceinline__ SharedLoader(
        const Params& p,
        typename Ring::Buffers& buffers,
        typename Ring::Own& own,
        const Item& first,
        int32_t first_item,
        int32_t end_item)
        : p(p), buffers(buffers), own(own) {
        StepPlace place = {first_item,       end_item,        first.first_page,
                           first.mask_entry, first.end_token, first.first_token};
        if (place.token >= place.end_token) {
            leave(place);
        }
        look_up(place);
        put(place);
        cp_async_commit_group();
    }

    // Copies the rows that were found into the buffer of step `step`.
    __device__ __forceinline__ void copy(uint32_t step) const {
        char* buffer = buffers.bytes[step % Ring::STAGES];
        const uint32_t keys = buffers.keys[step % 4][tid_x() / WARP_SIZE];
        copy_rows<0, Ring::K_ROW_BYTES>(buffer, p.head_dim, keys);
        copy_rows<1, Ring::V_ROW_BYTES>(buffer + Ring::V_OFFSET, p.head_dim_vo, keys);
    }

    // Finds the rows of step `step`, whose page ids are there, and looks up those of the next. Ends
    // the group of copies.
    __device__ __forceinline__ void advance(uint32_t step) {
        StepPlace place = own.place;
        find_rows(place, step);
        place.token += Ring::TOKENS;
        if (place.token >= place.end_token && place.item_idx < place.end_item) {
            leave(place);
        }
        look_up(place);
        put(place);
        cp_async_commit_group();
    }

    // To the next item with keys; behind the last there are none.
    __device__ __forceinline__ void leave(StepPlace& place) const {
        while (++place.item_idx < place.end_item) {
            const Item& item = p.work.items[place.item_idx];
            if (item.first_token < item.end_token) {
                place.first_page = item.first_page;
                place.mask_entry = item.mask_entry;
                place.end_token = item.end_token;
                place.token = item.first_token;
                return;
            }
        }
    }

    __device__ __forceinline__ int32_t own_token(const StepPlace& place) const {
        return place.token + Ring::row(tid_x() % OWN_ROWS);
    }

    // Past the item's end lanes look up the request's first page.
    __device__ __forceinline__ void look_up(const StepPlace& place) const {
        if (place.token >= place.end_token || tid_x() % WARP_SIZE >= OWN_ROWS) {
            return;
        }
        const int32_t token = own_token(place);
        const bool is_key = token < place.end_token;
        const uint32_t position = !is_key ? 0
                                  : p.work.mask.given()
                                      ? p.work.mask.position(place.mask_entry, token)
                                      : token;
        const Divisor& pages = p.table.page_divisor;
        const Index& indices = p.table.indices;
        const uint32_t page_idx = pages.quotient(position);
        auto& to = own.places[tid_x() % OWN_ROWS];
        to.entry = position - page_idx * pages.divisor;
        const int64_t i = place.first_page + static_cast<int64_t>(page_idx);
        if (!indices.given()) {
            to.page.low = static_cast<int32_t>(i);
            return;
        }
        const char* from = static_cast<const char*>(indices.data) + i * indices.stride;
        cp_async_4(smem_address(&to.page.low), from);
        if (indices.width == 8) {
            cp_async_4(smem_address(&to.page.high), from + 4);
        }
    }

    // Half of the lanes find rows of keys, half of values.
    __device__ __forceinline__ void find_rows(const StepPlace& place, uint32_t step) const {
        const int lane_idx = tid_x() % WARP_SIZE, which = lane_idx / OWN_ROWS % 2;
        const auto& cache = buffers.caches[which];
        const auto at = own.places[lane_idx % OWN_ROWS];
        const int64_t id = at.page.value(p.table.indices);
        const bool is_key =
            own_token(place) < place.end_token && id >= 0 && id < cache.max_num_pages;
        const uint32_t of_both = __ballot_sync(0xffffffffu, is_key);
        __syncwarp();  // every lane has read rows and places
        const int64_t offset = id * cache.page_stride + at.entry * cache.token_stride;
        if (lane_idx < 2 * OWN_ROWS) {
            own.rows[lane_idx % OWN_ROWS].begin[which] = cache.base + (is_key ? offset : 0);
        }
        if (lane_idx == 0) {
            buffers.keys[step % 4][tid_x() / WARP_SIZE] = of_both & of_both >> OWN_ROWS;
        }
    }

    __device__ __forceinline__ void put(const StepPlace& place) const {
        __syncwarp();  // every lane has read it
        if (tid_x() % WARP_SIZE == 0) {
            own.place = place;
        }
        __syncwarp();  // it is there, and so are the rows
    }

    // Rows that are no keys, and elements past a row's end, become zeros. Copies of rows that are
    // not aligned to 16 bytes are done when it returns, and leave what is past a row's end.
    template <int WHICH, int ROW_BYTES>
    __device__ __forceinline__ void copy_rows(char* buffer, int head_dim, uint32_t keys) const {
        constexpr int LANES = Ring::lanes(ROW_BYTES), ROWS = WARP_SIZE / LANES;
        const int lane_idx = tid_x() % WARP_SIZE;
        if constexpr (ALIGNED) {
            constexpr int NUM = OWN_ROWS / ROWS;
            const int first = lane_idx / LANES, chunk = lane_idx % LANES;
            const uint32_t to = smem_address(buffer) + swizzled<ROW_BYTES>(Ring::row(first), chunk);
            const uint32_t own_keys = chunk * 16 < head_dim * int{sizeof(KV)} ? keys >> first : 0;
            const char* from[NUM];
#pragma unroll
            for (int i = 0; i < NUM; ++i) {
                from[i] = own.rows[i * ROWS + first].begin[WHICH] + chunk * 16;
            }
#pragma unroll
            for (int i = 0; i < NUM; ++i) {
                const int src_bytes = own_keys >> i * ROWS & 1 ? 16 : 0;
                cp_async_16(to + i * ROWS * Ring::WARPS * ROW_BYTES, from[i], src_bytes);
            }
        } else {
            for (int i = 0; i < OWN_ROWS; ++i) {
                const KV* from = reinterpret_cast<const KV*>(own.rows[i].begin[WHICH]);
                for (int feat = lane_idx; feat < head_dim; feat += WARP_SIZE) {
                    const int byte = feat * sizeof(KV);
                    char* to = buffer + swizzled<ROW_BYTES>(Ring::row(i), byte / 16) + byte % 16;
                    *reinterpret_cast<KV*>(to) = keys >> i & 1 ? from[feat] : KV(0.0f);
                }
            }
        }
    }
};

}  // namespace cukv
