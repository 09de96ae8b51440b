// Warps that do nothing but have keys and values copied, by tensor maps, step by step ahead of
// those who compute with them.
//
// Cta: TOKENS of a step, K_STAGES and V_STAGES of the rings, PAGED, MASKED; Keys and Values, its
// tiles; Smem with rings k and v and their barriers. Params: table, work, k_cache, k_map,
// k_head_spans, the same of v, piece_bits.
#pragma once
#include "common/operand_tiles.cuh"
#include "common/work.cuh"

namespace cukv {

// Deals items to CTAs as they get done: those of the list's end first, which are the longest where
// attention is causal, and of so many KV heads at a time that CTAs share their keys in the L2. Of
// few items of like length each CTA works off those of its part instead. By a warp. An item is on
// its way while the one before it is worked on.
struct ItemDealer {
    const WorkList& work;
    const int heads_at_once;
    int32_t num_items;  // of the list; by parts -end of the part's: a register less
    int32_t asked;  // of the first lane: number of the next item but one among those of all heads;
                    // by parts, of the next in the list
    bool more;      // there is a next item
    Item item;      // the next
    int32_t head;   // its KV head

    // even: no item is much longer than another, if there are few.
    __device__ __forceinline__ ItemDealer(const WorkList& work, int heads_at_once, bool even)
        : work(work), heads_at_once(heads_at_once), num_items(0), asked(blockIdx.x) {
        const int32_t own = min(blockIdx.x / work.num_kv_heads, work.num_parts - 1);
        item = load_item(work.first_items + own);  // it is on its way while the others are counted
        const int32_t first_item = work.part_begin[own], end_item = work.part_end[own];
        for (int32_t part = threadIdx.x % WARP_SIZE; part < work.num_parts; part += WARP_SIZE) {
            num_items = max(num_items, work.part_end[part]);
        }
        num_items = __reduce_max_sync(0xffffffffu, num_items);
        // About as many tiles as parts or fewer, and a CTA for every part.
        const bool few = num_items <= 2 * work.num_parts;
        if (even && few && work.num_parts * work.num_kv_heads <= gridDim.x) {
            head = blockIdx.x % work.num_kv_heads;
            asked = first_item;
            num_items = -end_item;
            more = blockIdx.x / work.num_kv_heads == own && first_item < end_item;
        } else {
            look_ahead();
        }
    }

    __device__ __forceinline__ bool by_parts() const { return num_items <= 0; }

    __device__ __forceinline__ void look_ahead() {
        int32_t idx = 0;
        if (by_parts()) {
            idx = ++asked;
            more = idx < -num_items;
        } else {
            const int32_t number = __shfl_sync(0xffffffffu, asked, 0);
            more = number < int64_t{num_items} * work.num_kv_heads;
            const int32_t section = number / (num_items * heads_at_once);
            const int32_t within = number - section * num_items * heads_at_once;
            head = section * heads_at_once + within % heads_at_once;
            idx = num_items - 1 - within / heads_at_once;
            if (more && threadIdx.x % WARP_SIZE == 0) {
                asked = gridDim.x + atomicAdd(work.num_dealt(), 1);
            }
        }
        if (more) {
            item = load_item(work.items + idx);
        }
    }

    // Gives the next item that has rows, and its head; item.num_rows is 0 if there is none.
    __device__ __forceinline__ Item next(int32_t& kv_head) {
        Item found = {};
        while (found.num_rows == 0 && more) {
            found = item;
            kv_head = head;
            look_ahead();
        }
        return found;
    }

    // For the next launch, once all CTAs have come here.
    __device__ __forceinline__ void finish() const {
        if (by_parts()) {
            return;
        }
        if (threadIdx.x % WARP_SIZE == 0 && atomicAdd(work.num_finished(), 1) == gridDim.x - 1) {
            *work.num_dealt() = 0;
            *work.num_finished() = 0;
        }
    }
};

// Items from the warp that deals them to the others, through shared memory.
template <typename Cta>
struct ItemReader {
    typename Cta::Smem& smem;
    RingPlace<Cta::DEALT> at;

    __device__ __forceinline__ explicit ItemReader(typename Cta::Smem& smem) : smem(smem) {}

    __device__ __forceinline__ Item next(int32_t& kv_head) {
        mbarrier_try_wait(smem.dealt_full[at.stage], at.parity);
        const Item item = smem.dealt[at.stage].item;
        kv_head = smem.dealt[at.stage].kv_head;
        __syncwarp();  // all lanes have it
        if (threadIdx.x % WARP_SIZE == 0) {
            mbarrier_arrive(smem.dealt_empty[at.stage]);
        }
        at.next();
        return item;
    }
};

template <typename Cta>
struct ItemWriter {
    typename Cta::Smem& smem;
    RingPlace<Cta::DEALT> at;

    __device__ __forceinline__ explicit ItemWriter(typename Cta::Smem& smem) : smem(smem) {}

    __device__ __forceinline__ void put(const Item& item, int32_t kv_head) {
        mbarrier_try_wait(smem.dealt_empty[at.stage], at.parity ^ 1);
        __syncwarp();  // no lane waits any more
        if (threadIdx.x % WARP_SIZE == 0) {
            smem.dealt[at.stage].item = item;
            smem.dealt[at.stage].kv_head = kv_head;
            mbarrier_arrive(smem.dealt_full[at.stage]);
        }
        at.next();
    }
};

// Deals items to all warps, itself too, an item ahead of the one that it works on.
template <typename Cta>
struct AheadDealer : ItemDealer {
    ItemWriter<Cta> others;
    Item ahead;
    int32_t ahead_head;

    // What a cascade's leaves share is cut into even items.
    template <typename Params>
    __device__ __forceinline__ AheadDealer(const Params& p, typename Cta::Smem& smem)
        : ItemDealer(p.work, p.heads_at_once, p.levels.num_splits > 0), others(smem) {
        deal();
    }

    // The others have the next item while this one is worked on.
    __device__ __forceinline__ Item next(int32_t& kv_head) {
        const Item current = ahead;
        kv_head = ahead_head;
        if (current.num_rows > 0) {
            deal();
        }
        return current;
    }

  private:
    __device__ __forceinline__ void deal() {
        ahead = ItemDealer::next(ahead_head);
        others.put(ahead, ahead_head);
    }
};

// Steps of an item are at multiples of TOKENS, the last one first. An item without keys has one
// too.
template <int TOKENS>
__device__ __forceinline__ int32_t first_step(const Item& item) {
    return item.first_token & -TOKENS;
}

template <int TOKENS>
__device__ __forceinline__ int32_t last_step(const Item& item) {
    return max(item.end_token - 1, item.first_token) & -TOKENS;
}

// A step of an item's keys: those from `position` on of the request. Under a mask a step is an
// entry of the item's tile or a half of one, and items begin with whole ones; `token` counts the
// keys that entries list.
template <int TOKENS, bool MASKED>
struct Step {
    int32_t position;
    int32_t num_keys;  // of the item; none or less in the only step of an item without keys
    int32_t entry;     // as one of the mask; 0 where there are no keys, mixed where they are few

    __device__ __forceinline__ Step(const MaskTiles& mask, const Item& item, int32_t token)
        : position(token), num_keys(min(item.end_token - token, TOKENS)), entry(0) {
        if constexpr (MASKED) {
            static_assert(TOKENS == MASK_STEP || TOKENS == MASK_HALF, "a class is a step's");
            if (num_keys > 0) {
                entry = mask.entries[item.mask_entry + token / MASK_STEP];
                if constexpr (TOKENS == MASK_HALF) {
                    entry = half_entry(entry, token / MASK_HALF % 2);
                }
            }
            position = (entry >> 4) * TOKENS;
            if (num_keys > 0 && num_keys < TOKENS) {
                entry = (entry & ~ALL_CLASSES) | BOTH_MIXED;
            }
        }
    }
};

// Calls visit(item, kv_head, step) for each step of each item that a dealer or a reader gives.
template <typename Cta, typename Items, typename Params, typename Visit>
__device__ __forceinline__ void each_step(const Params& p, Items& items, Visit visit) {
    constexpr int TOKENS = Cta::TOKENS;
    while (true) {
        int32_t kv_head;
        const Item item = items.next(kv_head);
        if (item.num_rows <= 0) {
            return;
        }
        for (int32_t token = last_step<TOKENS>(item); token >= first_step<TOKENS>(item);
             token -= TOKENS) {
            visit(item, kv_head, Step<TOKENS, Cta::MASKED>(p.work.mask, item, token));
        }
    }
}

// How a warp has steps of keys or values copied. PAGED: in pieces of 2^piece_bits tokens, which lie
// in one page each, by one lane each; else a step is consecutive rows.
template <typename Tile, int TOKENS, bool PAGED>
struct StepCopy {
    const PageTable& table;
    const Pages& cache;
    const TensorMap& map;
    int32_t head_spans;  // from a head to the next, in units of 128 bytes
    int32_t piece_bits;

    // Where this lane's piece of a step is; page max_num_pages, which does not exist, gives zeros.
    struct Piece {
        int32_t page;
        int32_t entry;
        uint32_t dropped;  // of the step, by pieces: keys of the item whose page does not exist
    };

    template <typename Step>
    __device__ __forceinline__ Piece find(const Item& item, const Step& step) const {
        if constexpr (!PAGED) {
            return {};
        }
        const int32_t own = step.position + (threadIdx.x % WARP_SIZE << piece_bits);
        const bool wanted = own < step.position + step.num_keys;
        const uint32_t page_idx = table.page_divisor.quotient(own);
        const int64_t id = wanted ? table.indices[item.first_page + page_idx] : -1;
        const bool found = cache.has(id);
        return {
            static_cast<int32_t>(found ? id : cache.max_num_pages),
            static_cast<int32_t>(own - page_idx * table.page_divisor.divisor),
            __ballot_sync(0xffffffffu, wanted && !found)};
    }

    // Announces the step's bytes and starts its copies.
    __device__ __forceinline__ void issue(
        char* tile,
        uint64_t& full,
        const Item& item,
        int kv_head,
        int32_t position,
        const Piece& piece) const {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        if (lane_idx == 0) {
            mbarrier_arrive_expect_tx(full, Tile::BYTES);
        }
        __syncwarp();
        const uint32_t to = smem_address(tile);
        if constexpr (!PAGED) {
            if (lane_idx == 0) {
                cp_async_bulk_tensor_3d(
                    to, map, full, 0, item.first_page + position, kv_head * head_spans);
            }
        } else if (lane_idx < TOKENS >> piece_bits) {
            cp_async_bulk_tensor_5d(
                to + (lane_idx << piece_bits) / 8 * Tile::GROUP_BYTES, map, full, 0, 0,
                kv_head * head_spans, piece.entry / 8, piece.page);
        }
    }
};

// Keys, step by step; and items to all warps.
template <typename Cta, typename Params>
__device__ __forceinline__ void serve_keys(const Params& p, typename Cta::Smem& smem) {
    const StepCopy<typename Cta::Keys, Cta::TOKENS, Cta::PAGED> copy{
        p.table, p.k_cache, p.k_map, p.k_head_spans, p.piece_bits};
    RingPlace<Cta::K_STAGES> at;
    AheadDealer<Cta> dealer(p, smem);
    each_step<Cta>(p, dealer, [&](const Item& item, int32_t kv_head, const auto& step) {
        const auto piece = copy.find(item, step);
        mbarrier_try_wait(smem.k_empty[at.stage], at.parity ^ 1);
        if (Cta::PAGED && threadIdx.x == 0) {
            smem.k_dropped[at.stage][0] = piece.dropped;
        }
        if (Cta::MASKED && threadIdx.x == 0) {
            smem.k_entry[at.stage] = step.entry;
        }
        copy.issue(smem.k[at.stage], smem.k_full[at.stage], item, kv_head, step.position, piece);
        at.next();
    });
    dealer.finish();
}

// Values, step by step. Rows behind the item's keys may hold NaN, which a weight of 0 does not
// hide: they become zeros.
template <typename Cta, typename Params>
__device__ __forceinline__ void serve_values(const Params& p, typename Cta::Smem& smem) {
    using Values = typename Cta::Values;
    const StepCopy<Values, Cta::TOKENS, Cta::PAGED> copy{
        p.table, p.v_cache, p.v_map, p.v_head_spans, p.piece_bits};
    const int lane_idx = threadIdx.x % WARP_SIZE;
    RingPlace<Cta::V_STAGES> at;
    uint32_t landed_parity = 0;
    ItemReader<Cta> items(smem);
    each_step<Cta>(p, items, [&](const Item& item, int32_t kv_head, const auto& step) {
        const auto piece = copy.find(item, step);
        const int num_keys = max(step.num_keys, 0);
        char* tile = smem.v[at.stage];
        uint64_t& full = smem.v_full[at.stage];
        mbarrier_try_wait(smem.v_empty[at.stage], at.parity ^ 1);
        const bool whole = num_keys >= Cta::TOKENS;
        copy.issue(tile, whole ? full : smem.v_landed, item, kv_head, step.position, piece);
        if (!whole) {
            mbarrier_try_wait(smem.v_landed, landed_parity);
            landed_parity ^= 1;
#pragma unroll 4
            for (int row = num_keys + lane_idx / 8; row < Cta::TOKENS; row += WARP_SIZE / 8) {
#pragma unroll
                for (int i = 0; i < Values::COLUMNS / SWIZZLED_COLUMNS; ++i) {
                    char* chunk = tile + Values::span(row, i) + lane_idx % 8 * 16;
                    *reinterpret_cast<uint4*>(chunk) = uint4{};
                }
            }
            fence_proxy_async();
            __syncwarp();
            if (lane_idx == 0) {
                mbarrier_arrive(full);
            }
        }
        at.next();
    });
}

}  // namespace cukv
