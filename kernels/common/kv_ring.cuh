// Keys and values of a part, step by step through a ring of buffers.
//
// The steps of a part are those of its items, one item after the other, TOKENS keys each; an item's
// last step may have fewer. SHARERS warps copy a step together, TOKENS / SHARERS keys each; the
// WARPS / SHARERS teams take steps in turn. A KvRing's warps share none. Loads run ahead of the
// arithmetic, into the next items too, so that the memory is never idle between items.
// A step's page ids are looked up one step ahead: a lane holds the id of its token's page while it
// is on its way, and waits for it only when the copies start.
#pragma once
#include "common/swizzle.cuh"
#include "common/work.cuh"

namespace cukv {

template <int TOKENS>
__device__ __forceinline__ int32_t num_steps(const Item& item) {
    return (item.end_token - item.first_token + TOKENS - 1) / TOKENS;
}

// Where a warp is among its steps of a part.
struct StepPlace {
    int32_t item_idx, end_item;
    int32_t first_page;  // of the item's request
    int32_t mask_entry;  // of the item's tile
    int32_t end_token;   // of the item
    int32_t token;       // the step is [token, token + TOKENS) before end_token
};

// A warp's way through its steps of a part. MASKS: there may be a custom mask.
template <int TOKENS, int WARPS, int SHARERS, bool MASKS = true>
struct StepWalk : StepPlace {
    static constexpr int OWN_TOKENS = TOKENS / SHARERS;  // of a step, copied by this warp
    static_assert(WARP_SIZE % OWN_TOKENS == 0, "a lane looks up a token, or two the same");

    const PageTable& table;
    const WorkList& work;
    IndexEntry page;  // of this lane's token

    // To the warp's first step; `first` is items[first_item].
    __device__ __forceinline__ StepWalk(
        const PageTable& table,
        const WorkList& work,
        const Item& first,
        int32_t first_item,
        int32_t end_item)
        : StepPlace{first_item, end_item}, table(table), work(work) {
        int32_t step = threadIdx.x / (WARP_SIZE * SHARERS);
        if (!enter(first, step)) {
            leave(step);
        }
    }

    __device__ __forceinline__ bool done() const { return item_idx >= end_item; }

    // Whether the step is the warp's last, or none. It may not be known yet: items behind may have
    // no step for it.
    __device__ __forceinline__ bool is_ending() const {
        return item_idx + 1 >= end_item && end_token - token <= WARPS / SHARERS * TOKENS;
    }

    __device__ __forceinline__ void next() {
        token += WARPS / SHARERS * TOKENS;
        if (token < end_token) {
            look_up();
        } else {
            leave((token - end_token) / TOKENS);
        }
    }

    // To step `step` of an item; if the item has fewer, takes them off `step` and stays.
    __device__ __forceinline__ bool enter(const Item& item, int32_t& step) {
        const int32_t steps = num_steps<TOKENS>(item);
        if (step >= steps) {
            step -= steps;
            return false;
        }
        first_page = item.first_page;
        mask_entry = item.mask_entry;
        end_token = item.end_token;
        token = item.first_token + step * TOKENS;
        look_up();
        return true;
    }

    // To step `step` of all steps behind work.items[item_idx].
    __device__ __forceinline__ void leave(int32_t step) {
        do {
            ++item_idx;
        } while (item_idx < end_item && !enter(work.items[item_idx], step));
    }

    // First of the rows of a buffer that this warp copies.
    static __device__ __forceinline__ int own_row() {
        return threadIdx.x / WARP_SIZE % SHARERS * OWN_TOKENS;
    }

    __device__ __forceinline__ int32_t own_token() const {
        return token + own_row() + threadIdx.x % OWN_TOKENS;
    }

    // Where this lane's token, or the item's last if it is past the end, is in the request.
    __device__ __forceinline__ int32_t position() const {
        const int32_t own = own_token();
        if constexpr (MASKS) {
            if (work.mask.given()) {
                return work.mask.position(mask_entry, min(own, end_token - 1));
            }
        }
        return own;
    }

    // Of this lane's token within its page. Worked out again: registers are shorter than time.
    __device__ __forceinline__ int32_t entry() const {
        const int32_t own = position();
        return own - table.page_divisor.quotient(own) * table.page_divisor.divisor;
    }

    // Past the item's end it looks up the request's first page, so that no branch holds up the
    // load.
    __device__ __forceinline__ void look_up() {
        const uint32_t page_idx = table.page_divisor.quotient(position());
        page = table.indices.entry(own_token() < end_token ? first_page + page_idx : first_page);
    }
};

// Geometry of a buffer: rows of keys, and behind them rows of values, both swizzled.
template <typename KV_, int HEAD_DIM_QK, int HEAD_DIM_VO, int TOKENS_, int STAGES_, int WARPS_>
struct KvRing {
    using KV = KV_;
    static constexpr int TOKENS = TOKENS_, STAGES = STAGES_, WARPS = WARPS_;
    static constexpr int K_ROW_BYTES = HEAD_DIM_QK * sizeof(KV);
    static constexpr int V_ROW_BYTES = HEAD_DIM_VO * sizeof(KV);
    static constexpr int V_OFFSET = TOKENS * K_ROW_BYTES;  // bytes
    static constexpr int BYTES = V_OFFSET + TOKENS * V_ROW_BYTES;

    using Buffers = char[STAGES][BYTES];
    // Of a buffer: bit t, whether row t is a key.
    using KeyBits = typename UintOf<TOKENS / 8>::type;
    using Keys = KeyBits[STAGES];

    // Where the rows begin that are copied next. In shared memory, because every lane copies a
    // chunk of many rows, and a look-up there is one instruction.
    struct RowStarts {
        const char* k[TOKENS];
        const char* v[TOKENS];
    };
};

// Finds where a token of an item is, for a launch that still waits for others, so that item and
// page ids may be those of an earlier plan or anything else: every index but the page id is
// checked, nothing but the L2 may learn of them, and they are read past the L1, which would keep
// them.
__device__ __forceinline__ bool find_early(
    const PageTable& table, const Item& item, int64_t token, Slot& slot) {
    if (token < 0 || token >= item.end_token) {
        return false;
    }
    const int64_t page_idx = table.page_divisor.quotient(static_cast<uint32_t>(token));
    const int64_t idx = item.first_page + page_idx;
    if (idx < 0 || idx >= table.indices.size) {
        return false;
    }
    slot.page = table.indices.entry_past_l1(idx).value(table.indices);
    slot.entry = token - page_idx * table.page_size;
    return true;
}

// Starts bringing a row into the L2.
template <int ROW_BYTES>
__device__ __forceinline__ void prefetch_row(const char* row, int num_bytes) {
    constexpr int LINE = 128;  // bytes
#pragma unroll
    for (int byte = 0; byte < ROW_BYTES; byte += LINE) {
        if (byte < num_bytes) {
            prefetch_l2(row + byte);
        }
    }
}

// The same for a run of tokens, all heads of each, from the `token`-th of an item on: of at most
// `num_tokens`, and of one page, whose bytes are those of the cache whatever the item says. Both
// caches' tokens are runs.
template <typename Params>
__device__ __forceinline__ void prefetch_run(
    const Params& p, const Item& item, int64_t token, int num_tokens) {
    Slot slot;
    if (find_early(p.table, item, token, slot) && p.k_cache.has(slot.page) &&
        p.v_cache.has(slot.page)) {
        const int64_t on_page = min(item.end_token - token, p.table.page_size - slot.entry);
        const int64_t num = min(int64_t{num_tokens}, on_page);
        cp_async_bulk_prefetch_l2(p.k_cache.row(slot, 0), num * p.k_cache.token_stride);
        cp_async_bulk_prefetch_l2(p.v_cache.row(slot, 0), num * p.v_cache.token_stride);
    }
}

// Starts bringing what a part begins with into the L2, while the launch waits for others: keys
// and values of as many tokens as all rings hold. Nothing waits for them. Where tokens are runs, a
// thread asks for one of RUN tokens, and CTAs of all heads, which walk side by side, take them in
// turn; or else a thread looks up a token, for both, and asks line by line. Params: table, work,
// k_cache, v_cache, head_dim, head_dim_vo.
template <typename Ring, typename Params>
__device__ __forceinline__ void prefetch_first_keys(const Params& p, int part, int kv_head) {
    constexpr int TOKENS = Ring::WARPS * Ring::STAGES * Ring::TOKENS, RUN = 16;
    constexpr int THREADS = Ring::WARPS * WARP_SIZE, BYTES = sizeof(typename Ring::KV);
    if (!LAUNCHED_EARLY || p.work.mask.given()) {  // a mask's tokens are not positions
        return;
    }
    if (threadIdx.x < 2) {
        prefetch_l2((threadIdx.x == 0 ? p.work.part_begin : p.work.part_end) + part);
    }
    const Item item = load_item_past_l1(p.work.first_items + part);
    const int num_heads = p.work.num_kv_heads;
    if (p.table.page_size % RUN == 0 && p.k_cache.has_runs(num_heads, p.head_dim * BYTES) &&
        p.v_cache.has_runs(num_heads, p.head_dim_vo * BYTES)) {
        const int token = (kv_head + num_heads * threadIdx.x) * RUN;
        if (token < TOKENS) {
            prefetch_run(p, item, int64_t{item.first_token} + token, RUN);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < TOKENS; i += THREADS) {
        const int token = i + threadIdx.x;
        Slot slot;
        if (token < TOKENS && find_early(p.table, item, int64_t{item.first_token} + token, slot) &&
            p.k_cache.has(slot.page) && p.v_cache.has(slot.page)) {
            prefetch_row<Ring::K_ROW_BYTES>(p.k_cache.row(slot, kv_head), p.head_dim * BYTES);
            prefetch_row<Ring::V_ROW_BYTES>(p.v_cache.row(slot, kv_head), p.head_dim_vo * BYTES);
        }
    }
}

// Fills a warp's ring. Params: table, work, k_cache, v_cache, head_dim, head_dim_vo. EVICT_FIRST:
// keys and values leave the L2 first. Nobody else reads them, and what the next launch has brought
// there meanwhile stays.
template <typename Ring, bool ALIGNED, bool EVICT_FIRST, typename Params>
struct KvLoader {
    using KV = typename Ring::KV;
    using Walk = StepWalk<Ring::TOKENS, Ring::WARPS, 1>;

    const Params& p;
    typename Ring::Buffers& buffers;
    typename Ring::Keys& keys;
    typename Ring::RowStarts& rows;
    const int& kv_head;
    Walk walk;

    __device__ __forceinline__ KvLoader(
        const Params& p,
        typename Ring::Buffers& buffers,
        typename Ring::Keys& keys,
        typename Ring::RowStarts& rows,
        const int& kv_head,
        const Item& first,
        int32_t first_item,
        int32_t end_item)
        : p(p),
          buffers(buffers),
          keys(keys),
          rows(rows),
          kv_head(kv_head),
          walk(p.table, p.work, first, first_item, end_item) {}

    // Starts the copies of the next step into a buffer, as one group, which is empty past the last
    // step: whoever waits counts groups.
    // Before the last step the next launch is let in, so that its CTAs are placed as soon as this
    // launch's end. It may rely on the end of all launches before this one.
    __device__ __forceinline__ void issue(int stage) {
        __syncwarp();  // the buffer, and the rows of the step before, have been read
        if (!walk.done()) {
            const uint32_t votes = find_rows(stage);
            if (ALIGNED && votes == 0xffffffffu) {
                copy<true>(stage, votes);
            } else {
                copy<false>(stage, votes);
            }
        }
        cp_async_commit_group();
        if (!walk.done()) {
            walk.next();
            if (walk.is_ending()) {
                griddepcontrol_wait();
                griddepcontrol_launch_dependents();
            }
        }
    }

    // Says where the next step's rows are, and which of them are keys: bit r, whether row r is.
    __device__ __forceinline__ uint32_t find_rows(int stage) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        const int64_t id = walk.page.value(p.table.indices);
        const bool has_key =
            walk.own_token() < walk.end_token && p.k_cache.has(id) && p.v_cache.has(id);
        const uint32_t votes = __ballot_sync(0xffffffffu, has_key);
        if (lane_idx < Ring::TOKENS) {
            const Slot slot = {has_key ? id : 0, has_key ? walk.entry() : 0};
            rows.k[lane_idx] = p.k_cache.row(slot, kv_head);
            rows.v[lane_idx] = p.v_cache.row(slot, kv_head);
        }
        if (lane_idx == 0) {
            keys[stage] = votes;
        }
        __syncwarp();  // the rows are there
        return votes;
    }

    template <bool ALL>
    __device__ __forceinline__ void copy(int stage, uint32_t votes) {
        char* k = buffers[stage];
        char* v = k + Ring::V_OFFSET;
        if constexpr (ALIGNED) {
            const uint64_t policy =
                EVICT_FIRST ? createpolicy_evict_first() : createpolicy_evict_unchanged();
            copy_rows<Ring::K_ROW_BYTES, ALL>(
                k, rows.k, p.head_dim * int{sizeof(KV)}, votes, policy);
            copy_rows<Ring::V_ROW_BYTES, ALL>(
                v, rows.v, p.head_dim_vo * int{sizeof(KV)}, votes, policy);
        } else if constexpr (!ALL) {
            copy_elements<KV, Ring::K_ROW_BYTES>(k, rows.k, p.head_dim, votes);
            copy_elements<KV, Ring::V_ROW_BYTES>(v, rows.v, p.head_dim_vo, votes);
        }
    }
};

}  // namespace cukv
