// Warps that do nothing but have keys and values copied, by tensor maps, step by step ahead of those
// who compute with them.
//
// Cta: TOKENS of a step, STAGES of the ring, PAGED; Keys and Values, its tiles; Smem with rings k and
// v and their barriers. Params: table, work, k_cache, k_map, k_head_spans, the same of v, piece_bits.
#pragma once
#include "common/operand_tiles.cuh"
#include "common/work.cuh"

namespace cukv {

// The items of a CTA, one after the other: those of its part for one KV head, then for the next of
// its heads. gridDim.x / num_parts heads are worked on at a time.
struct ItemWalk {
    const WorkList& work;
    int32_t begin_item, end_item, item_idx;
    int32_t kv_head, heads_at_once;

    __device__ __forceinline__ explicit ItemWalk(const WorkList& work) : work(work) {
        heads_at_once = gridDim.x / work.num_parts;
        kv_head = blockIdx.x % heads_at_once;
        const int part = blockIdx.x / heads_at_once;
        begin_item = item_idx = work.part_begin[part];
        end_item = work.part_end[part];
    }

    // Gives the next item that has rows, and its head; item.num_rows is 0 when there is none.
    __device__ __forceinline__ Item next(int32_t& head) {
        Item item = {};
        while (item.num_rows == 0 && kv_head < work.num_kv_heads) {
            head = kv_head;
            if (item_idx < end_item) {
                item = load_item(work.items + item_idx++);
            } else {
                item_idx = begin_item;
                kv_head += heads_at_once;
            }
        }
        return item;
    }
};

// Steps of an item are at multiples of TOKENS, the last one first. An item without keys has one too.
template <int TOKENS>
__device__ __forceinline__ int32_t first_step(const Item& item) {
    return item.first_token & -TOKENS;
}

template <int TOKENS>
__device__ __forceinline__ int32_t last_step(const Item& item) {
    return max(item.end_token - 1, item.first_token) & -TOKENS;
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

    __device__ __forceinline__ Piece find(const Item& item, int32_t token) const {
        if constexpr (!PAGED) {
            return {};
        }
        const int32_t own = token + (threadIdx.x % WARP_SIZE << piece_bits);
        const bool wanted = own < min(item.end_token, token + TOKENS);
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
        int32_t token,
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
                    to, map, full, 0, item.first_page + token, kv_head * head_spans);
            }
        } else if (lane_idx < TOKENS >> piece_bits) {
            cp_async_bulk_tensor_5d(
                to + (lane_idx << piece_bits) / 8 * Tile::GROUP_BYTES, map, full, 0, 0,
                kv_head * head_spans, piece.entry / 8, piece.page);
        }
    }
};

// Warp 0: keys, step by step.
template <typename Cta, typename Params>
__device__ __forceinline__ void serve_keys(const Params& p, typename Cta::Smem& smem) {
    const StepCopy<typename Cta::Keys, Cta::TOKENS, Cta::PAGED> copy{
        p.table, p.k_cache, p.k_map, p.k_head_spans, p.piece_bits};
    typename Cta::Place at;
    ItemWalk walk(p.work);
    int32_t kv_head;
    for (Item item = walk.next(kv_head); item.num_rows > 0; item = walk.next(kv_head)) {
        for (int32_t token = last_step<Cta::TOKENS>(item); token >= first_step<Cta::TOKENS>(item);
             token -= Cta::TOKENS) {
            const auto piece = copy.find(item, token);
            mbarrier_try_wait(smem.k_empty[at.stage], at.parity ^ 1);
            if (Cta::PAGED && threadIdx.x == 0) {
                smem.k_dropped[at.stage] = piece.dropped;
            }
            copy.issue(smem.k[at.stage], smem.k_full[at.stage], item, kv_head, token, piece);
            at.next();
        }
    }
}

// Warp 1: values, step by step. Rows behind the item's keys may hold NaN, which a weight of 0 does not
// hide: they become zeros.
template <typename Cta, typename Params>
__device__ __forceinline__ void serve_values(const Params& p, typename Cta::Smem& smem) {
    using Values = typename Cta::Values;
    const StepCopy<Values, Cta::TOKENS, Cta::PAGED> copy{
        p.table, p.v_cache, p.v_map, p.v_head_spans, p.piece_bits};
    constexpr int CHUNKS = Values::BYTES / Cta::TOKENS / 16;  // of a row
    const int lane_idx = threadIdx.x % WARP_SIZE;
    typename Cta::Place at;
    uint32_t landed_parity = 0;
    ItemWalk walk(p.work);
    int32_t kv_head;
    for (Item item = walk.next(kv_head); item.num_rows > 0; item = walk.next(kv_head)) {
        for (int32_t token = last_step<Cta::TOKENS>(item); token >= first_step<Cta::TOKENS>(item);
             token -= Cta::TOKENS) {
            const auto piece = copy.find(item, token);
            const int num_keys = max(item.end_token - token, 0);
            char* tile = smem.v[at.stage];
            uint64_t& full = smem.v_full[at.stage];
            mbarrier_try_wait(smem.v_empty[at.stage], at.parity ^ 1);
            const bool whole = num_keys >= Cta::TOKENS;
            copy.issue(tile, whole ? full : smem.v_landed, item, kv_head, token, piece);
            if (!whole) {
                mbarrier_try_wait(smem.v_landed, landed_parity);
                landed_parity ^= 1;
                for (int i = num_keys * CHUNKS + lane_idx; i < Cta::TOKENS * CHUNKS;
                     i += WARP_SIZE) {
                    const int offset = Values::offset(i / CHUNKS, i % CHUNKS);
                    *reinterpret_cast<uint4*>(tile + offset) = uint4{};
                }
                fence_proxy_async();
                __syncwarp();
                if (lane_idx == 0) {
                    mbarrier_arrive(full);
                }
            }
            at.next();
        }
    }
}

}  // namespace cukv
