// Warps that copy keys and values token by token, where no tensor map can describe them: pages of
// any size, and tokens that lie at any multiple of 16 bytes.
//
// A step's barrier hears from the copies themselves that they have landed, lane by lane; who copies
// waits for free stages alone. Bytes come as a thread's own writes do, so who multiplies has a
// fence of proxies behind the barrier. Cta and Params: those of common/kv_server.cuh, and v_cache.
#pragma once
#include "common/dropped_keys.cuh"
#include "common/kv_server.cuh"

namespace cukv {

// How a warp copies steps of keys or values. A lane finds every 32nd token of a step. Eight lanes
// copy a row, 128 bytes at a time, and a warp the same rows of four groups of 8, UNROLL of each
// group side by side: as many as there are registers for.
template <typename Tile, int TOKENS, int UNROLL>
struct TokenCopy {
    static constexpr int NUM = TOKENS / WARP_SIZE;  // tokens that a lane finds
    static constexpr int UNIT = 16;                 // bytes; rows are less than 2^31 of them apart
    static constexpr int32_t NO_ROW = -0x7fffffff - 1;
    static_assert(TOKENS % WARP_SIZE == 0, "every lane finds as many tokens");
    static_assert(Tile::COLUMNS % SWIZZLED_COLUMNS == 0, "a row is copied whole spans at a time");

    const PageTable& table;
    const Pages& cache;

    // Page ids of this lane's tokens, on their way.
    struct Ids {
        IndexEntry pages[NUM];
    };

    // Which lane this is, anew: all that follows from it would be kept in registers.
    static __device__ __forceinline__ int lane() { return tid_x() % WARP_SIZE; }

    template <typename Step>
    __device__ __forceinline__ Ids look_up(const Item& item, const Step& step) const {
        Ids ids;
#pragma unroll
        for (int k = 0; k < NUM; ++k) {
            const int own = k * WARP_SIZE + lane();
            const uint32_t page_idx = table.page_divisor.quotient(step.position + own);
            ids.pages[k] = own < step.num_keys ? table.indices.entry(item.first_page + page_idx)
                                               : IndexEntry{-1, -1};
        }
        return ids;
    }

    // This lane's rows, in units from the cache's first token of the head; NO_ROW where there is no
    // key. Calls missing(k, bits) for each 32 keys: bit j tells whether the page of key 32 * k + j
    // does not exist.
    template <typename Step, typename Missing>
    __device__ __forceinline__ void find(
        int32_t (&starts)[NUM], const Step& step, const Ids& ids, Missing missing) const {
        // All of it fits into 32 bits, as the host makes sure; the compiler cannot know.
        const int32_t page_units = static_cast<int32_t>(cache.page_stride / UNIT);
        const int32_t token_units = static_cast<int32_t>(cache.token_stride / UNIT);
#pragma unroll
        for (int k = 0; k < NUM; ++k) {
            const int64_t id = ids.pages[k].value(table.indices);
            const bool found = cache.has(id);
            const uint32_t position = step.position + k * WARP_SIZE + lane();
            const uint32_t page_idx = table.page_divisor.quotient(position);
            const int32_t entry = position - page_idx * table.page_divisor.divisor;
            const int32_t start = static_cast<int32_t>(id) * page_units + entry * token_units;
            starts[k] = found ? start : NO_ROW;
            const uint32_t wanted = low_bits(step.num_keys - k * WARP_SIZE);
            missing(k, wanted & ~__ballot_sync(0xffffffffu, found));
        }
    }

    // Starts the copies of a step; every lane arrives when its own have landed. Rows that are no
    // keys become zeros, and are not read.
    __device__ __forceinline__ void issue(
        char* tile, uint64_t& full, const int32_t (&starts)[NUM], int kv_head) const {
        const int group = lane() / 8, chunk = lane() % 8;
        const char* from = cache.base + kv_head * cache.head_stride + chunk * UNIT;
        uint32_t to = smem_address(tile) + Tile::offset(group * 8, 0);
#pragma unroll UNROLL
        for (int i = 0; i < 8; ++i) {
            const uint32_t row_to = to + ((chunk ^ i) << 4);
#pragma unroll
            for (int k = 0; k < NUM; ++k) {
                const int32_t start = __shfl_sync(0xffffffffu, starts[k], i, 8);
                const char* row = from + int64_t{start} * UNIT;
                const int src_bytes = start != NO_ROW ? 16 : 0;
#pragma unroll
                for (int span = 0; span < Tile::COLUMNS / SWIZZLED_COLUMNS; ++span) {
                    cp_async_16(
                        row_to + k * (WARP_SIZE / 8) * Tile::GROUP_BYTES + span * Tile::SPAN_BYTES,
                        row + span * 128, src_bytes);
                }
            }
            to += 128;
        }
        cp_async_mbarrier_arrive(full);
    }
};

// Deals items as AheadDealer does, but reads the one that it works on where the others do: keys
// find no registers for an item more. So one look ahead is all that deal() has room for.
template <typename Cta>
struct SharedDealer : ItemDealer {
    typename Cta::Smem& smem;
    uint32_t num_put = 0;

    template <typename Params>
    __device__ __forceinline__ SharedDealer(const Params& p, typename Cta::Smem& smem)
        : ItemDealer(p.work, p.heads_at_once, p.levels.num_splits > 0), smem(smem) {
        deal();
    }

    // The others have the next item while this one is worked on.
    __device__ __forceinline__ Item next(int32_t& kv_head) {
        // What was dealt last stays until more is.
        const auto& dealt = smem.dealt[(num_put - 1) % Cta::DEALT];
        const Item current = dealt.item;
        kv_head = dealt.kv_head;
        if (current.num_rows > 0) {
            deal();
        }
        return current;
    }

  private:
    // Deals the next item that has rows, or one without if there is none.
    __device__ __forceinline__ void deal() {
        bool found;
        do {
            if (!more) {
                item.num_rows = 0;
            }
            found = !more || item.num_rows > 0;
            if (found) {
                put();
            }
            if (more) {
                look_ahead();
            }
        } while (!found);
    }

    __device__ __forceinline__ void put() {
        const uint32_t place = num_put % Cta::DEALT, parity = num_put / Cta::DEALT & 1;
        mbarrier_try_wait(smem.dealt_empty[place], parity ^ 1);
        __syncwarp();  // no lane waits any more
        if (threadIdx.x % WARP_SIZE == 0) {
            smem.dealt[place].item = item;
            smem.dealt[place].kv_head = head;
            mbarrier_arrive(smem.dealt_full[place]);
        }
        __syncwarp();  // it is there for all lanes
        ++num_put;
    }
};

// Keys, step by step; and items to all warps. By warp 0.
template <typename Cta, typename Params>
__device__ __forceinline__ void serve_key_tokens(const Params& p, typename Cta::Smem& smem) {
    using Dropped = DroppedKeys<Cta::MAPPED>;
    static_assert(Cta::TOKENS <= 128, "four words have a bit for each key");
    using Keys = typename Cta::Keys;
    using Copy = TokenCopy<Keys, Cta::TOKENS, (Keys::COLUMNS > 128 ? 1 : 4)>;
    const Copy copy{p.table, p.k_cache};
    RingPlace<Cta::K_STAGES> at;
    SharedDealer<Cta> dealer(p, smem);
    each_step<Cta>(p, dealer, [&](const Item& item, int32_t kv_head, const auto& step) {
        const auto ids = copy.look_up(item, step);
        int32_t starts[Copy::NUM];
        Dropped dropped;
        copy.find(starts, step, ids, [&](int k, uint32_t missing) { dropped.add(k, missing); });
        mbarrier_try_wait(smem.k_empty[at.stage], at.parity ^ 1);
        if (const int lane = tid_x(); lane < Dropped::WORDS) {
            smem.k_dropped[at.stage][lane] = dropped.bits;
        }
        if (Cta::MASKED && tid_x() == 0) {
            smem.k_entry[at.stage] = step.entry;
        }
        copy.issue(smem.k[at.stage], smem.k_full[at.stage], starts, kv_head);
        __syncwarp();
        if (tid_x() == 0) {
            mbarrier_arrive(smem.k_full[at.stage]);  // what is told with the keys is there
        }
        at.next();
    });
    dealer.finish();
}

// Values, step by step; those of no keys are zeros. By a warp.
template <typename Cta, typename Params>
__device__ __forceinline__ void serve_value_tokens(const Params& p, typename Cta::Smem& smem) {
    using Copy = TokenCopy<typename Cta::Values, Cta::TOKENS, 8>;
    const Copy copy{p.table, p.v_cache};
    RingPlace<Cta::V_STAGES> at;
    ItemReader<Cta> items(smem);
    each_step<Cta>(p, items, [&](const Item& item, int32_t kv_head, const auto& step) {
        const auto ids = copy.look_up(item, step);
        int32_t starts[Copy::NUM];
        copy.find(starts, step, ids, [](int, uint32_t) {});
        mbarrier_try_wait(smem.v_empty[at.stage], at.parity ^ 1);
        copy.issue(smem.v[at.stage], smem.v_full[at.stage], starts, kv_head);
        at.next();
    });
}

}  // namespace cukv
