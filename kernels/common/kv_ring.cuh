// Keys and values of a part, step by step through a ring of buffers.
//
// The steps of a part are those of its items, one item after the other, TOKENS keys each; an item's
// last step may have fewer. SHARERS warps copy a step together, TOKENS / SHARERS keys each; the
// WARPS / SHARERS teams take steps in turn. Loads run ahead of the arithmetic, into the next items
// too, so that the memory is never idle between items.
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

// A warp's way through its steps of a part.
template <int TOKENS, int WARPS, int SHARERS>
struct StepWalk {
    static constexpr int OWN_TOKENS = TOKENS / SHARERS;  // of a step, copied by this warp
    static_assert(WARP_SIZE % OWN_TOKENS == 0, "a lane looks up a token, or two the same");

    const PageTable& table;
    const Item* items;
    int32_t item_idx, end_item;
    int32_t first_page;  // of the item's request
    int32_t end_token;   // of the item
    int32_t token;       // the step is [token, token + TOKENS) before end_token
    IndexEntry page;     // of this lane's token

    // To the warp's first step; `first` is items[first_item].
    __device__ __forceinline__ StepWalk(
        const PageTable& table,
        const Item* items,
        const Item& first,
        int32_t first_item,
        int32_t end_item)
        : table(table), items(items), item_idx(first_item), end_item(end_item) {
        int32_t step = threadIdx.x / (WARP_SIZE * SHARERS);
        if (!enter(first, step)) {
            leave(step);
        }
    }

    __device__ __forceinline__ bool done() const { return item_idx >= end_item; }

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
        end_token = item.end_token;
        token = item.first_token + step * TOKENS;
        look_up();
        return true;
    }

    // To step `step` of all steps behind items[item_idx].
    __device__ __forceinline__ void leave(int32_t step) {
        do {
            ++item_idx;
        } while (item_idx < end_item && !enter(items[item_idx], step));
    }

    // First of the rows of a buffer that this warp copies.
    static __device__ __forceinline__ int own_row() {
        return threadIdx.x / WARP_SIZE % SHARERS * OWN_TOKENS;
    }

    __device__ __forceinline__ int32_t own_token() const {
        return token + own_row() + threadIdx.x % OWN_TOKENS;
    }

    // Of this lane's token within its page. Worked out again: registers are shorter than time.
    __device__ __forceinline__ int32_t entry() const {
        const uint32_t page_idx = table.page_divisor.quotient(own_token());
        return own_token() - page_idx * table.page_divisor.divisor;
    }

    // Past the item's end it looks up the request's first page, so that no branch holds up the load.
    __device__ __forceinline__ void look_up() {
        const int32_t own = own_token();
        const uint32_t page_idx = table.page_divisor.quotient(own);
        page = table.indices.entry(own < end_token ? first_page + page_idx : first_page);
    }
};

// Geometry of a buffer: rows of keys, and behind them rows of values, both swizzled.
template <
    typename KV_,
    int HEAD_DIM_QK,
    int HEAD_DIM_VO,
    int TOKENS_,
    int STAGES_,
    int WARPS_,
    int SHARERS_>
struct KvRing {
    using KV = KV_;
    static constexpr int TOKENS = TOKENS_, STAGES = STAGES_, WARPS = WARPS_, SHARERS = SHARERS_;
    static constexpr int K_ROW_BYTES = HEAD_DIM_QK * sizeof(KV);
    static constexpr int V_ROW_BYTES = HEAD_DIM_VO * sizeof(KV);
    static constexpr int V_OFFSET = TOKENS * K_ROW_BYTES;  // bytes
    static constexpr int BYTES = V_OFFSET + TOKENS * V_ROW_BYTES;

    using Buffers = char[STAGES][BYTES];
    // Of a buffer: bit t, whether row t is a key. Each warp that shares it writes bits of its own.
    using KeyBits = typename UintOf<TOKENS / 8>::type;
    using Keys = KeyBits[STAGES];
    using OwnBits = typename UintOf<TOKENS / SHARERS / 8>::type;
};

// Fills a warp's ring. Params: table, work, k_cache, v_cache, head_dim, head_dim_vo, evict_first.
template <typename Ring, bool ALIGNED, typename Params>
struct KvLoader {
    using KV = typename Ring::KV;
    using Walk = StepWalk<Ring::TOKENS, Ring::WARPS, Ring::SHARERS>;

    const Params& p;
    typename Ring::Buffers& buffers;
    typename Ring::Keys& keys;
    int kv_head;
    Walk walk;

    __device__ __forceinline__ KvLoader(
        const Params& p,
        typename Ring::Buffers& buffers,
        typename Ring::Keys& keys,
        int kv_head,
        const Item& first,
        int32_t first_item,
        int32_t end_item)
        : p(p),
          buffers(buffers),
          keys(keys),
          kv_head(kv_head),
          walk(p.table, p.work.items, first, first_item, end_item) {}

    // Starts the copies of the next step into a buffer, as one group, which is empty past the last
    // step: whoever waits counts groups.
    __device__ __forceinline__ void issue(int stage) {
        if (!walk.done()) {
            const int64_t id = walk.page.value(p.table.indices);
            const bool has_key =
                walk.own_token() < walk.end_token && p.k_cache.has(id) && p.v_cache.has(id);
            const uint32_t votes = __ballot_sync(0xffffffffu, has_key);
            if (threadIdx.x % WARP_SIZE == 0) {
                const int own = Walk::own_row() / Walk::OWN_TOKENS;
                reinterpret_cast<typename Ring::OwnBits*>(&keys[stage])[own] = votes;
            }
            char* k = buffers[stage] + Walk::own_row() * Ring::K_ROW_BYTES;
            char* v = buffers[stage] + Ring::V_OFFSET + Walk::own_row() * Ring::V_ROW_BYTES;
            copy<Ring::K_ROW_BYTES>(k, p.k_cache, p.head_dim, id, has_key, votes);
            copy<Ring::V_ROW_BYTES>(v, p.v_cache, p.head_dim_vo, id, has_key, votes);
        }
        cp_async_commit_group();
        if (!walk.done()) {
            walk.next();
        }
    }

    template <int ROW_BYTES>
    __device__ __forceinline__ void copy(
        char* buffer, const Pages& cache, int head_dim, int64_t id, bool has_key, uint32_t votes) {
        const char* head = cache.base + kv_head * cache.head_stride;
        const int64_t offset =
            has_key ? id * cache.page_stride + walk.entry() * cache.token_stride : 0;
        if constexpr (ALIGNED) {
            constexpr int UNROLL = Ring::SHARERS == 1 ? 8 : 4;  // sharers have fewer registers left
            const int num_bytes = head_dim * int{sizeof(KV)};
            const uint64_t policy =
                p.evict_first ? createpolicy_evict_first() : createpolicy_evict_unchanged();
            copy_rows<ROW_BYTES, Walk::OWN_TOKENS, UNROLL>(
                buffer, head, offset, num_bytes, votes, policy);
        } else {
            copy_elements<KV, ROW_BYTES, Walk::OWN_TOKENS>(buffer, head, offset, head_dim, votes);
        }
    }
};

}  // namespace cukv
