// The same two buffers as common/shared_ring.cuh where keys lie in runs: the rows of a step that a
// warp copies lie one behind the other, in one page or packed. So they are found all at once.
//
// Packed keys are found without a look-up. Page ids, or the entries of a mask that packed keys are
// listed by, come by asynchronous copies, of step n + 2 while step n is computed, and rows by them,
// of step n + 1.
//
//   row of a step = warp * OWN_ROWS + own row, of which R are copied at once
#pragma once
#include "common/products.cuh"
#include "common/shared_ring.cuh"

namespace cukv {

// PAGED: keys are in pages of a multiple of OWN_ROWS tokens; else packed. MASKED: there is a mask.
template <
    typename KV_,
    int HEAD_DIM_QK,
    int HEAD_DIM_VO,
    int TOKENS_,
    int WARPS_,
    bool PAGED_,
    bool MASKED_>
struct RunRing : SharedRing<KV_, HEAD_DIM_QK, HEAD_DIM_VO, TOKENS_, WARPS_> {
    using Base = SharedRing<KV_, HEAD_DIM_QK, HEAD_DIM_VO, TOKENS_, WARPS_>;
    using Base::TOKENS, Base::WARPS, Base::STAGES, Base::BYTES, Base::OWN_ROWS;
    static constexpr bool PAGED = PAGED_, MASKED = MASKED_;
    // Steps whose runs are kept: the one that is copied and the one that is looked up; under a mask
    // the one that is computed too.
    static constexpr int RUNS = MASKED ? 4 : 2;
    static_assert(!(PAGED && MASKED), "a step is looked up once");
    static_assert(!MASKED || TOKENS == MASK_HALF, "a step has one entry, and one class");
    static_assert(OWN_ROWS % 8 == 0, "a warp's rows are swizzled alike");
    static_assert(TOKENS <= 64, "bits say which rows are keys");
    static_assert(WARPS == 4, "a word says of all warps' runs how many keys they have");

    // The first row of a step that a warp copies.
    static __device__ __forceinline__ int first_row() { return tid_x() / WARP_SIZE * OWN_ROWS; }

    // What a lane would have to work out again in every step.
    struct alignas(16) Lane {
        const char* k_from;  // its bytes of the KV head's row 0, of page 0 or of all
        const char* v_from;
        uint32_t to;  // of the first row of keys that it copies, in buffer 0
        OperandAddresses operands;
    };

    // What all warps share.
    struct Buffers {
        alignas(1024) char bytes[STAGES][BYTES];
        Lane lanes[WARPS * WARP_SIZE];
        alignas(16) uint8_t num_keys[4][WARPS];  // of a warp's run, of four steps in turn

        // Whether all rows of a step are keys. Packed keys end where their item does.
        __device__ __forceinline__ bool are_keys(uint32_t step) const {
            const uint32_t all = *reinterpret_cast<const uint32_t*>(num_keys[step % 4]);
            return !PAGED || all == OWN_ROWS * 0x01010101u;
        }

        // Bit t, whether row t of a step is a key; the item has `num_tokens` from its first on.
        __device__ __forceinline__ uint64_t key_bits(uint32_t step, int32_t num_tokens) const {
            if constexpr (!PAGED) {
                return uint64_t{low_bits(num_tokens - 32)} << 32 | low_bits(num_tokens);
            }
            uint64_t bits = 0;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) {
                bits |= uint64_t{low_bits(num_keys[step % 4][i])} << i * OWN_ROWS;
            }
            return bits;
        }
    };

    struct alignas(16) RunPlace {
        IndexEntry page;   // that was looked up, if there are keys; of a mask, `low` is the entry
        uint32_t entry;    // of the first row within it; of a mask, the row if it were of step 0
        int32_t num_keys;  // if there is such a page
    };

    // What a warp knows of steps to come; in shared memory because steps need all registers.
    struct Own {
        RunPlace runs[RUNS];  // of steps in turn
        // Where the step is that is looked up next, or of packed keys copied next.
        int32_t tokens[2];           // its first, by the parity of the step
        int32_t item_idx, end_item;  // not beside tokens what is read as one of them is written
        int32_t first_page, end_token;
        int32_t mask_entry;  // of the item's tile, under a mask

        // The entry of the mask of a step that is computed.
        __device__ __forceinline__ int32_t entry(uint32_t step) const {
            return runs[step % RUNS].page.low;
        }
    };
};

// Fills the buffers of a part. Params: table, work, k_cache, v_cache.
template <typename Ring, typename Params>
struct RunLoader {
    // Steps that look_up() is ahead.
    static constexpr int AHEAD = Ring::PAGED || Ring::MASKED ? 2 : 1;

    const Params& p;
    typename Ring::Buffers& buffers;
    typename Ring::Own& own;

    // By every thread, before any step.
    static __device__ __forceinline__ void begin(
        const Params& p,
        typename Ring::Buffers& buffers,
        int kv_head,
        const OperandAddresses& operands) {
        const int lane_idx = tid_x() % WARP_SIZE, chunk = lane_idx % Ring::LANES;
        const int row = Ring::first_row() + lane_idx / Ring::LANES;
        const uint32_t to = smem_address(buffers.bytes[0]);
        buffers.lanes[tid_x()] = {
            p.k_cache.base + kv_head * p.k_cache.head_stride + chunk * 16,
            p.v_cache.base + kv_head * p.v_cache.head_stride + chunk * 16,
            to + swizzled<Ring::K_ROW_BYTES>(row, chunk), operands};
    }

    // At the first step of a part; `first` is items[first_item].
    __device__ __forceinline__ RunLoader(
        const Params& p,
        typename Ring::Buffers& buffers,
        typename Ring::Own& own,
        const Item& first,
        int32_t first_item,
        int32_t end_item)
        : p(p), buffers(buffers), own(own) {
        own.item_idx = first_item;
        own.end_item = end_item;
        own.first_page = first.first_page;
        own.end_token = first.end_token;
        own.tokens[0] = first.first_token;
        if constexpr (Ring::MASKED) {
            own.mask_entry = first.mask_entry;
        }
        if (first.first_token >= first.end_token) {
            leave(0);
        }
    }

    // Starts copying step 0, and looks up what this and the ones behind it need.
    __device__ __forceinline__ void start() const {
        __syncwarp();  // where step 0 is
        if (AHEAD == 2 && look_up(0)) {
            leave(1);
        }
        cp_async_commit_group();
        cp_async_wait_group<0>();
        __syncwarp();  // what was looked up
        load(~0u);
    }

    // All that goes with step `step`, at once.
    __device__ __forceinline__ void load(uint32_t step) const {
        const Copies copies(*this, step + 1);
#pragma unroll
        for (int i = 0; i < Ring::GROUPS; ++i) {
            copies.start(i);
        }
        if (look_up(step + AHEAD)) {
            leave(step + AHEAD + 1);
        }
    }

    // This lane's copies of rows of a step. Rows that are no keys become zeros.
    struct Copies {
        const char *k_from, *v_from;
        uint32_t k_stride, v_stride;
        uint32_t to;
        int32_t num_keys;  // from this lane's first row on

        __device__ __forceinline__ Copies(const RunLoader& loader, uint32_t step) {
            static_assert(Ring::K_ROW_BYTES == Ring::V_ROW_BYTES, "values lie as keys do");
            const Params& p = loader.p;
            const auto lane = loader.buffers.lanes[tid_x()];
            const int first = tid_x() % WARP_SIZE / Ring::LANES;
            to = lane.to + step % Ring::STAGES * Ring::BYTES;
            k_stride = Ring::PAGED ? p.k_cache.token_stride : p.k_cache.page_stride;
            v_stride = Ring::PAGED ? p.v_cache.token_stride : p.v_cache.page_stride;
            k_from = lane.k_from;
            v_from = lane.v_from;
            uint32_t row;
            if constexpr (Ring::PAGED) {
                const auto at = loader.own.runs[step % Ring::RUNS];
                const int64_t id = at.page.value(p.table.indices);
                const int64_t num_pages = min(p.k_cache.max_num_pages, p.v_cache.max_num_pages);
                const bool is_page = static_cast<uint64_t>(id) < static_cast<uint64_t>(num_pages);
                const uint32_t page = is_page ? static_cast<uint32_t>(id) : 0;
                num_keys = is_page ? at.num_keys : 0;
                loader.buffers.num_keys[step % 4][tid_x() / WARP_SIZE] = num_keys;
                k_from = on(k_from, page, p.k_cache.page_stride);
                v_from = on(v_from, page, p.v_cache.page_stride);
                row = at.entry;
            } else if constexpr (Ring::MASKED) {
                const auto at = loader.own.runs[step % Ring::RUNS];
                num_keys = at.num_keys;
                const int32_t mask_step = num_keys > 0 ? at.page.low >> 4 : 0;
                row = at.entry + mask_step * MASK_STEP;
                // Requests of garbage offsets may list each other's steps. In 32 bits, where the
                // host has seen that rows fit (_has_runs): registers are short.
                const int32_t k_rows = p.k_cache.max_num_pages, v_rows = p.v_cache.max_num_pages;
                num_keys = min(num_keys, min(k_rows, v_rows) - static_cast<int32_t>(row));
            } else {
                const int32_t token = loader.own.tokens[step % 2] + Ring::first_row();
                num_keys = loader.own.end_token - token;
                row = loader.own.first_page + token;
            }
            num_keys -= first;
            k_from = on(k_from, row + first, k_stride);
            v_from = on(v_from, row + first, v_stride);
        }

        // `num` strides on: one instruction, of strides of 32 bits.
        static __device__ __forceinline__ const char* on(
            const char* from, uint32_t num, uint32_t stride) {
            return reinterpret_cast<const char*>(
                mad_wide(num, stride, reinterpret_cast<uint64_t>(from)));
        }

        // What goes behind the n-th ldmatrix of keys: so few instructions need not be spread.
        __device__ __forceinline__ void meanwhile(int n) const {
            if (n < Ring::GROUPS) {
                start(n);
            }
        }

        // One of GROUPS parts.
        __device__ __forceinline__ void start(int i) const {
            const uint32_t row = i * Ring::R;
            const int num_bytes = static_cast<int>(row) < num_keys ? 16 : 0;
            start_row<Ring::K_ROW_BYTES>(to, on(k_from, row, k_stride), row, num_bytes);
            start_row<Ring::V_ROW_BYTES>(
                to + Ring::V_OFFSET, on(v_from, row, v_stride), row, num_bytes);
        }

        template <int ROW_BYTES>
        static __device__ __forceinline__ void start_row(
            uint32_t to, const char* from, int row, int num_bytes) {
#pragma unroll
            for (int span = 0; span < ROW_BYTES; span += Ring::SPAN) {
                cp_async_16(rows_on<ROW_BYTES>(to, row) + span * 8, from + span, num_bytes);
            }
        }
    };

    // What else goes with step `step`.
    struct LookUps {
        const RunLoader& loader;
        uint32_t step;
        bool leaves = false;

        __device__ __forceinline__ LookUps(const RunLoader& loader, uint32_t step)
            : loader(loader), step(step) {}

        // What goes behind the n-th of `num` ldmatrix of values.
        __device__ __forceinline__ void meanwhile(int n, int num) {
            if (n == num / 8 * 5) {
                leaves = loader.look_up(step + AHEAD);
            }
        }

        __device__ __forceinline__ void finish() const {
            if (leaves) {
                loader.leave(step + AHEAD + 1);
            }
        }
    };

    // Says where the step behind `step` is, and starts looking up what this one is found by. True:
    // nowhere in its item, so that leave() must come before it is looked up.
    __device__ __forceinline__ bool look_up(uint32_t step) const {
        const int32_t step_token = own.tokens[step % 2], end_token = own.end_token;
        if constexpr (Ring::PAGED) {
            const int32_t token = step_token + Ring::first_row();
            const int32_t num_keys = min(max(end_token - token, 0), Ring::OWN_ROWS);
            const Divisor& pages = p.table.page_divisor;
            const Index& indices = p.table.indices;
            const uint32_t page_idx = pages.quotient(token);
            const int64_t i = own.first_page + static_cast<int64_t>(page_idx);
            auto& to = own.runs[step % Ring::RUNS];
            to.entry = token - page_idx * pages.divisor;
            to.num_keys = num_keys;
            const bool is_given = num_keys > 0 && tid_x() % WARP_SIZE == 0;
            copy_entry(to.page, indices, i, is_given);
        } else if constexpr (Ring::MASKED) {
            auto& to = own.runs[step % Ring::RUNS];
            const uint32_t listed = step_token;
            const int num_entries = step_token < end_token ? 1 : 0;  // for a lane each
            to.entry = own.first_page + listed % MASK_STEP + Ring::first_row();
            to.num_keys = end_token - step_token - Ring::first_row();
            cp_async_4_if(
                static_cast<int>(tid_x() % WARP_SIZE) < num_entries, smem_address(&to.page.low),
                p.work.mask.entries + own.mask_entry + listed / MASK_STEP);
        }
        own.tokens[(step + 1) % 2] = step_token + Ring::TOKENS;  // by every lane the same
        return step_token + Ring::TOKENS >= end_token;
    }

    // From the end of an item to the next one with keys, where step `step` is; behind the last
    // there are none.
    __device__ __forceinline__ void leave(uint32_t step) const {
        __syncwarp();  // every lane has written where the item's last step is
        int32_t item_idx = own.item_idx;
        int32_t first_page = own.first_page, end_token = own.end_token;
        int32_t token = own.tokens[step % 2];
        int32_t mask_entry = own.mask_entry;
        next_with_keys(p.work, item_idx, own.end_item, [&](const Item& item) {
            first_page = item.first_page;
            end_token = item.end_token;
            token = item.first_token;
            mask_entry = item.mask_entry;
        });
        __syncwarp();  // every lane has read it
        own.item_idx = item_idx;
        own.first_page = first_page;
        own.end_token = end_token;
        own.tokens[step % 2] = token;
        if constexpr (Ring::MASKED) {
            own.mask_entry = mask_entry;
        }
    }
};

}  // namespace cukv
