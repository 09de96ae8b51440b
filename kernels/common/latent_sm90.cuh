// Latent rows on Hopper: tiles in shared memory, and the warps that fill them.
//
// A tile is 64 keys, or the 64 rows of queries, in 9 blocks of 64 columns: ckv and then kpe. Two
// tiles of keys lie side by side, for even and odd steps of an item. A side of a tile is half of
// its ckv, which one warpgroup adds up; the block of kpe, once scored, makes room for the weights
// of its step, which the other warpgroup reads, and so it goes with that one's side.
#pragma once
#include "common/latent_maps.cuh"
#include "common/latent_merge.cuh"
#include "common/swizzle.cuh"

namespace cukv {

constexpr int LATENT_TOKENS = 64;  // of a tile
constexpr int LATENT_TOKENS_BITS = 6;
static_assert(LATENT_TOKENS == 1 << LATENT_TOKENS_BITS, "a token's tile is found by a shift");
constexpr int LATENT_ROWS = 64;  // of a tile of queries
constexpr int LATENT_BLOCKS = 9, KPE_BLOCK = 8;
constexpr int BLOCK_BYTES = 64 * 128;

struct LatentSmem {
    alignas(1024) char q[LATENT_BLOCKS][BLOCK_BYTES];
    char tiles[2][LATENT_BLOCKS][BLOCK_BYTES];
    float maxima[2][LATENT_ROWS];           // reference maxima, from the warpgroup of a tile
    float denominators[2][2][LATENT_ROWS];  // of items in turn and of warpgroups
    uint64_t keys[2];                       // bit t, whether row t of a tile is a key
    uint64_t full[2][2][2];                 // barriers of tile, side, and half of a side
    uint64_t empty[2][2];                   // of tile and side
    uint64_t landed[4];        // of a warp that loads: a side some of whose rows are to be zeroed
    uint64_t weights_full[2];  // of a tile
    uint64_t even_scored;      // all products of an even tile's scores have begun
    uint64_t q_full, q_empty;
    Item items[2];  // in turn
    Gate gates[2];  // of the first and the last item

    // By one thread.
    __device__ __forceinline__ void init() {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            mbarrier_init(full[i / 4][i / 2 % 2][i % 2], 1);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            mbarrier_init(empty[i / 2][i % 2], 4);  // warps of a warpgroup
            mbarrier_init(landed[i], 1);
        }
        mbarrier_init(weights_full[0], 4);
        mbarrier_init(weights_full[1], 4);
        mbarrier_init(even_scored, 4);
        mbarrier_init(q_full, 4);   // warps that load
        mbarrier_init(q_empty, 8);  // warps that compute
        fence_mbarrier_init();
    }
};

// By the first lane of a warp, behind what all of its lanes have read and written.
__device__ __forceinline__ void arrive(uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % WARP_SIZE == 0) {
        mbarrier_arrive(barrier);
    }
}

// One of the four warps that load. Each fills one side of every other tile of keys, and a quarter
// of the rows of queries. MAPPED: keys come by tensor maps, which takes pages of whole eights;
// otherwise every lane copies pieces of rows.
template <typename KV, bool MAPPED>
struct LatentProducer {
    static constexpr int KIND = is_same<KV, half> ? KIND_HALF : KIND_BFLOAT16;

    // A copy of one piece.
    struct Box {
        uint32_t to;
        int block;
        int32_t entry, page;
    };

    const LatentMappedParams& p;
    LatentSmem& smem;
    const int warp_idx;  // of the four
    const int stage, side;
    const uint64_t policy;
    IndexEntry pages[2];  // of a lane's two tokens of the next tile
    uint32_t parity;      // of the side's next phase
    uint32_t landed_parity;

    __device__ __forceinline__
    LatentProducer(const LatentMappedParams& p, LatentSmem& smem, int warp_idx)
        : p(p),
          smem(smem),
          warp_idx(warp_idx),
          stage(warp_idx % 2),
          side(warp_idx / 2),
          policy(p.evict_first ? createpolicy_evict_first() : createpolicy_evict_unchanged()),
          parity(1),  // the phase before the first is over
          landed_parity(0) {}

    __device__ __forceinline__ void run(int block, int part) {
        const Item* from = p.work.first_items + part;
        int32_t item_idx = p.work.part_begin[part];
        const int32_t end_item = p.work.part_end[part];
        if (warp_idx == 0 && threadIdx.x % WARP_SIZE == 0) {
            smem.items[0] = load_item(from);  // so that it is in the L1 when it is known to be one
        }
        uint32_t q_parity = 1;
        while (item_idx < end_item) {
            const Item item = load_item(from);
            int32_t token = item.first_token + stage * LATENT_TOKENS;
            const bool has_keys = token < item.end_token;
            if (has_keys) {  // else the request may have no page to look up
                look_up(item, token);
            }
            // Queries first, while the pages are looked up: there is room for them before there is
            // any for keys.
            mbarrier_try_wait(smem.q_empty, q_parity);
            q_parity ^= 1;
            if (warp_idx == 0 && threadIdx.x % WARP_SIZE == 0) {
                smem.items[q_parity] = item;
            }
            load_queries(item, block);
            if (has_keys) {
                load_keys(item, token);
            }
            if (!MAPPED && has_keys) {
                cp_async_wait_group<2>();  // those of the keys are behind
                publish(smem.q_full);
                publish_keys();
            } else {
                cp_async_wait_group<0>();
                publish(smem.q_full);
            }
            for (token += 2 * LATENT_TOKENS; token < item.end_token; token += 2 * LATENT_TOKENS) {
                load_keys(item, token);
                if (!MAPPED) {
                    publish_keys();
                }
            }
            from = p.work.items + ++item_idx;
        }
    }

    // What this warp has copied can be read.
    __device__ __forceinline__ void publish(uint64_t& barrier) {
        fence_proxy_async();
        arrive(barrier);
    }

    // The same of a side, whose two groups of copies are the latest.
    __device__ __forceinline__ void publish_keys() {
        cp_async_wait_group<1>();
        publish(smem.full[stage][side][0]);
        cp_async_wait_group<0>();
        publish(smem.full[stage][side][1]);
    }

    // Starts to load the page ids of a lane's two tokens. Past the end it is the request's first.
    __device__ __forceinline__ void look_up(const Item& item, int32_t token) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32_t own = token + threadIdx.x % WARP_SIZE + i * WARP_SIZE;
            const int32_t page_idx = p.table.page_divisor.quotient(own);
            const bool is_past = own >= item.end_token;
            pages[i] = p.table.indices.entry(item.first_page + (is_past ? 0 : page_idx));
        }
    }

    // Loads this warp's side of the tile of the keys from `token` on.
    __device__ __forceinline__ void load_keys(const Item& item, int32_t token) {
        int64_t ids[2];
        uint32_t votes[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32_t own = token + threadIdx.x % WARP_SIZE + i * WARP_SIZE;
            ids[i] = pages[i].value(p.table.indices);
            const bool has_key = own < item.end_token && p.ckv.has(ids[i]) && p.kpe.has(ids[i]);
            ids[i] = has_key ? ids[i] : p.ckv.max_num_pages;
            votes[i] = __ballot_sync(0xffffffffu, has_key);
        }
        look_up(item, token + 2 * LATENT_TOKENS);
        Box at;
        if constexpr (MAPPED) {
            at = box(token, ids, threadIdx.x % WARP_SIZE);  // now, not when the side is free
        }
        mbarrier_try_wait(smem.empty[stage][side], parity);
        parity ^= 1;
        if (side == 0 && threadIdx.x % WARP_SIZE == 0) {
            smem.keys[stage] = uint64_t{votes[1]} << 32 | votes[0];
        }
        if constexpr (MAPPED) {
            load_boxes(at, token, ids, votes);
        } else {
            load_rows(token, ids, votes);
        }
    }

    // By tensor maps. What lies outside of the array comes as zeros, and so do pages that are not
    // there; other rows that are not keys may hold anything, and are zeroed.
    __device__ __forceinline__ void load_boxes(
        const Box& at, int32_t token, const int64_t (&ids)[2], const uint32_t (&votes)[2]) {
        const int num_blocks = 4 + (stage != side);
        auto& full = smem.full[stage][side];
        uint64_t& landed = smem.landed[warp_idx];
        const bool all_keys = (votes[0] & votes[1]) == 0xffffffffu;
        if (threadIdx.x % WARP_SIZE == 0) {
            mbarrier_arrive_expect_tx(
                all_keys ? full[0] : landed, (all_keys ? 2 : num_blocks) * BLOCK_BYTES);
            if (all_keys) {
                mbarrier_arrive_expect_tx(full[1], (num_blocks - 2) * BLOCK_BYTES);
            }
        }
        copy_boxes(
            at, token, ids, num_blocks, all_keys ? full[0] : landed, all_keys ? full[1] : landed);
        if (all_keys) {
            return;
        }
        mbarrier_try_wait(landed, landed_parity);
        landed_parity ^= 1;
        for (int row = threadIdx.x % WARP_SIZE / 8; row < LATENT_TOKENS; row += WARP_SIZE / 8) {
            if ((row < WARP_SIZE ? votes[0] : votes[1]) >> row % WARP_SIZE & 1) {
                continue;
            }
            for (int i = 0; i < num_blocks; ++i) {
                char* to = smem.tiles[stage][block_of(i)] + row * 128 + threadIdx.x % 8 * 16;
                *reinterpret_cast<uint4*>(to) = uint4{};
            }
        }
        publish(full[0]);
        arrive(full[1]);
    }

    // The i-th block of the side.
    __device__ __forceinline__ int block_of(int i) const {
        return i < 4 ? side * 4 + i : KPE_BLOCK;
    }

    // The copy-th of a side: the pieces of one block after another. By all lanes.
    __device__ __forceinline__ Box box(int32_t token, const int64_t (&ids)[2], int copy) const {
        const int row = copy << p.piece_bits & LATENT_TOKENS - 1;
        const int low = __shfl_sync(0xffffffffu, static_cast<int>(ids[0]), row % WARP_SIZE);
        const int high = __shfl_sync(0xffffffffu, static_cast<int>(ids[1]), row % WARP_SIZE);
        const uint32_t page_idx = p.table.page_divisor.quotient(token + row);
        const int32_t entry = token + row - page_idx * p.table.page_divisor.divisor;
        const int block = block_of(copy >> (LATENT_TOKENS_BITS - p.piece_bits));
        const uint32_t to = smem_address(smem.tiles[stage][block] + row * 128);
        return {to, block, entry, row < WARP_SIZE ? low : high};
    }

    // Starts the copies of all pieces, the lane's first of which is given: of blocks 0 and 1 to one
    // barrier, of the others to another.
    __device__ __forceinline__ void copy_boxes(
        Box at,
        int32_t token,
        const int64_t (&ids)[2],
        int num_blocks,
        uint64_t& first,
        uint64_t& second) {
        __syncwarp();  // the barriers know of the bytes
        const int num_copies = num_blocks * (LATENT_TOKENS >> p.piece_bits);
        for (int copy = threadIdx.x % WARP_SIZE;; at = box(token, ids, copy)) {
            if (copy < num_copies) {
                const bool is_kpe = at.block == KPE_BLOCK;
                cp_async_bulk_tensor_4d(
                    at.to, is_kpe ? p.kpe_map : p.ckv_map, at.block - side * 4 < 2 ? first : second,
                    0, at.entry, is_kpe ? 0 : at.block, at.page, policy);
            }
            copy += WARP_SIZE;
            if (copy - static_cast<int>(threadIdx.x % WARP_SIZE) >= num_copies) {
                break;
            }
        }
    }

    // By all lanes, as two groups of copies. Rows that are not keys become zeros.
    __device__ __forceinline__ void load_rows(
        int32_t token, const int64_t (&ids)[2], const uint32_t (&votes)[2]) {
        int64_t ckv[2], kpe[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int lane_idx = threadIdx.x % WARP_SIZE;
            const int32_t own = token + lane_idx + i * WARP_SIZE;
            const uint32_t page_idx = p.table.page_divisor.quotient(own);
            const int32_t entry = own - page_idx * p.table.page_divisor.divisor;
            const bool has_key = votes[i] >> lane_idx & 1;
            ckv[i] = has_key ? ids[i] * p.ckv.page_stride + entry * p.ckv.token_stride : 0;
            kpe[i] = has_key ? ids[i] * p.kpe.page_stride + entry * p.kpe.token_stride : 0;
        }
        auto& tile = smem.tiles[stage];
        const int first = side * 4;
        copy_blocks<2>(tile[first], p.ckv.base + first * 128, ckv, votes);
        cp_async_commit_group();
        copy_blocks<2>(tile[first + 2], p.ckv.base + (first + 2) * 128, ckv, votes);
        if (stage != side) {
            copy_blocks<1>(tile[KPE_BLOCK], p.kpe.base, kpe, votes);
        }
        cp_async_commit_group();
    }

    // NUM neighbouring blocks of a tile.
    template <int NUM>
    __device__ __forceinline__ void copy_blocks(
        char* blocks, const char* base, const int64_t (&offsets)[2], const uint32_t (&votes)[2]) {
        const int lane_idx = threadIdx.x % WARP_SIZE, chunk = lane_idx % 8;
#pragma unroll 2
        for (int i = 0; i < 16; ++i) {
            const int row = 4 * i + lane_idx / 8;
            const int64_t low = __shfl_sync(0xffffffffu, offsets[0], row);
            const int64_t high = __shfl_sync(0xffffffffu, offsets[1], row);
            const char* from = base + (i < 8 ? low : high) + chunk * 16;
            const int num_bytes = ((i < 8 ? votes[0] : votes[1]) >> row % WARP_SIZE & 1) * 16;
            const uint32_t to = smem_address(blocks) + swizzled<128>(row, chunk);
#pragma unroll
            for (int block = 0; block < NUM; ++block) {
                cp_async_16(to + block * BLOCK_BYTES, from + block * 128, num_bytes, policy);
            }
        }
    }

    // Loads this warp's rows of the item's queries, as one group of copies; those past its rows are
    // as any others, and nothing of them is kept.
    __device__ __forceinline__ void load_queries(const Item& item, int block) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        // Lane i has the place of row i.
        const LatentRow at(p, item, block, warp_idx * 16 + lane_idx % 16);
        const int64_t nope = at.owned ? p.q_nope_rows.offset(at.at) : 0;
        const int64_t pe = at.owned ? p.q_pe_rows.offset(at.at) : 0;
        if (p.q_nope_rows.kind == KIND && p.q_nope_rows.aligned && p.q_pe_rows.aligned) {
            copy_queries(nope, pe);
        } else {
#pragma unroll 1
            for (int i = 0; i < 16; ++i) {
                const char* q_nope = p.q_nope + __shfl_sync(0xffffffffu, nope, i);
                const char* q_pe = p.q_pe + __shfl_sync(0xffffffffu, pe, i);
                const int row = warp_idx * 16 + i;
                load_query(q_nope, p.q_nope_rows, row, lane_idx, lane_idx);
                load_query(q_nope, p.q_nope_rows, row, lane_idx + WARP_SIZE, lane_idx + WARP_SIZE);
                if (lane_idx < 8) {
                    load_query(q_pe, p.q_pe_rows, row, lane_idx, KPE_BLOCK * 8 + lane_idx);
                }
            }
        }
        cp_async_commit_group();
    }

    // Queries that are as products take them, given the places of lane i's row i.
    __device__ __forceinline__ void copy_queries(int64_t nope, int64_t pe) {
        const int lane_idx = threadIdx.x % WARP_SIZE, chunk = lane_idx % 8;
        const uint64_t unchanged = createpolicy_evict_unchanged();
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
            const int row = 4 * i + lane_idx / 8;
            const char* q_nope = p.q_nope + __shfl_sync(0xffffffffu, nope, row) + chunk * 16;
            const char* q_pe = p.q_pe + __shfl_sync(0xffffffffu, pe, row) + chunk * 16;
            const uint32_t to = smem_address(smem.q) + swizzled<128>(warp_idx * 16 + row, chunk);
#pragma unroll
            for (int block = 0; block < KPE_BLOCK; ++block) {
                cp_async_16(to + block * BLOCK_BYTES, q_nope + block * 128, 16, unchanged);
            }
            cp_async_16(to + KPE_BLOCK * BLOCK_BYTES, q_pe, 16, unchanged);
        }
    }

    // The i-th eight elements of a row, to a chunk of it.
    __device__ __forceinline__ void load_query(
        const char* q, const QueryRows& rows, int row, int i, int chunk) {
        const char* from = q + 8 * i * element_bytes(rows.kind);
        char* to = smem.q[chunk / 8] + swizzled<128>(row, chunk % 8);
        Query8 x;
        x.load(from, rows.kind, rows.aligned);
        Vec<KV, 8> y;
        y.raw = x.bits;
        if (rows.kind != KIND) {
            float floats[8];
            x.to_floats(floats, rows.kind);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                y[e] = from_float<KV>(floats[e]);
            }
        }
        store_vec(to, y);
    }
};

}  // namespace cukv
