// Latent rows on Hopper: tiles in shared memory, who fills them and who says that they are read.
//
// A tile is 64 keys, or the 64 rows of queries, in 9 blocks of 64 columns: ckv and then kpe. Two
// tiles of keys lie side by side, for even and odd steps of an item. A side of a tile is half of its
// ckv, which one warpgroup adds up; the block of kpe, once scored, makes room for the weights of its
// step, which the other warpgroup reads, and so it goes with that one's side.
#pragma once
#include "common/latent.cuh"
#include "common/ptx_sm90.cuh"
#include "common/swizzle.cuh"

namespace cukv {

constexpr int LATENT_TOKENS = 64, LATENT_ROWS = 64;  // of a tile
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
    uint64_t q_full, q_empty;
    uint64_t weights_full[2];  // of a tile
    Item items[2];             // in turn
    Gate::Visit visits[2];     // of the first and the last item

    // By one thread.
    __device__ __forceinline__ void init() {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            mbarrier_init(full[i / 4][i / 2 % 2][i % 2], 1);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            mbarrier_init(empty[i / 2][i % 2], 4);  // warps of a warpgroup
        }
        mbarrier_init(weights_full[0], 4);
        mbarrier_init(weights_full[1], 4);
        mbarrier_init(q_full, 4);   // warps that load
        mbarrier_init(q_empty, 8);  // warps that compute
        fence_mbarrier_init();
    }
};

// By the first lane of a warp for all of it.
__device__ __forceinline__ void arrive(uint64_t& barrier) {
    if (threadIdx.x % WARP_SIZE == 0) {
        mbarrier_arrive(barrier);
    }
}

// One of the four warps that load. Each fills one side of every other tile of keys, and a quarter
// of the rows of queries.
template <typename KV>
struct LatentProducer {
    const LatentParams& p;
    LatentSmem& smem;
    const int warp_idx;  // of the four
    const int stage, side;
    const uint64_t policy;

    __device__ __forceinline__ LatentProducer(const LatentParams& p, LatentSmem& smem, int warp_idx)
        : p(p),
          smem(smem),
          warp_idx(warp_idx),
          stage(warp_idx % 2),
          side(warp_idx / 2),
          policy(p.evict_first ? createpolicy_evict_first() : createpolicy_evict_unchanged()) {}

    __device__ __forceinline__ void run(int block, int32_t first_item, int32_t end_item) {
        uint32_t parity = 1, q_parity = 1;  // of what was before is over
        for (int32_t item_idx = first_item; item_idx < end_item; ++item_idx) {
            const Item item = load_item(p.work.items + item_idx);
            int32_t token = item.first_token + stage * LATENT_TOKENS;
            IndexEntry pages[2];
            look_up(pages, item, token);
            mbarrier_wait(smem.q_empty, q_parity);
            q_parity ^= 1;
            if (warp_idx == 0 && threadIdx.x % WARP_SIZE == 0) {
                smem.items[item_idx - first_item & 1] = item;
                smem.visits[item_idx > first_item].begin(p.work, item, block);
            }
            load_queries(item, block);
            bool q_arrives = true;
            for (; token < item.end_token; token += 2 * LATENT_TOKENS) {
                load_keys(item, token, pages, parity);
                parity ^= 1;
                look_up(pages, item, token + 2 * LATENT_TOKENS);
                if (q_arrives) {
                    cp_async_wait_group<2>();
                    publish(smem.q_full);
                    q_arrives = false;
                }
                cp_async_wait_group<1>();
                publish(smem.full[stage][side][0]);
                cp_async_wait_group<0>();
                publish(smem.full[stage][side][1]);
            }
            if (q_arrives) {
                cp_async_wait_group<0>();
                publish(smem.q_full);
            }
        }
    }

    // What this warp has copied can be read.
    __device__ __forceinline__ void publish(uint64_t& barrier) {
        fence_proxy_async();
        __syncwarp();
        arrive(barrier);
    }

    // Starts to load the page ids of a lane's two tokens. Past the end it is the request's first.
    __device__ __forceinline__ void look_up(
        IndexEntry (&pages)[2], const Item& item, int32_t token) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32_t own = token + threadIdx.x % WARP_SIZE + i * WARP_SIZE;
            const int32_t page_idx = p.table.page_divisor.quotient(own);
            pages[i] =
                p.table.indices.entry(item.first_page + (own < item.end_token ? page_idx : 0));
        }
    }

    // Copies this warp's side of the tile of the keys from `token` on, as two groups.
    __device__ __forceinline__ void load_keys(
        const Item& item, int32_t token, const IndexEntry (&pages)[2], uint32_t parity) {
        int64_t ckv[2], kpe[2];
        uint32_t votes[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32_t own = token + threadIdx.x % WARP_SIZE + i * WARP_SIZE;
            const uint32_t page_idx = p.table.page_divisor.quotient(own);
            const int32_t entry = own - page_idx * p.table.page_divisor.divisor;
            const int64_t id = pages[i].value(p.table.indices);
            const bool has_key = own < item.end_token && p.ckv.has(id) && p.kpe.has(id);
            votes[i] = __ballot_sync(0xffffffffu, has_key);
            ckv[i] = has_key ? id * p.ckv.page_stride + entry * p.ckv.token_stride : 0;
            kpe[i] = has_key ? id * p.kpe.page_stride + entry * p.kpe.token_stride : 0;
        }
        mbarrier_wait(smem.empty[stage][side], parity);
        if (side == 0 && threadIdx.x % WARP_SIZE == 0) {
            smem.keys[stage] = uint64_t{votes[1]} << 32 | votes[0];
        }
        auto& tile = smem.tiles[stage];
        const int first = side * 4;
        copy<2>(tile[first], p.ckv.base + first * 128, ckv, votes);
        cp_async_commit_group();
        copy<2>(tile[first + 2], p.ckv.base + (first + 2) * 128, ckv, votes);
        if (stage != side) {
            copy<1>(tile[KPE_BLOCK], p.kpe.base, kpe, votes);
        }
        cp_async_commit_group();
    }

    // Copies 64 rows of NUM blocks. Rows that are not keys become zeros.
    template <int NUM>
    __device__ __forceinline__ void copy(
        char* blocks, const char* base, const int64_t (&offsets)[2], const uint32_t (&votes)[2]) {
        const int lane_idx = threadIdx.x % WARP_SIZE, chunk = lane_idx % 8;
#pragma unroll 4
        for (int i = 0; i < 16; ++i) {
            const int row = 4 * i + lane_idx / 8;
            const int64_t low = __shfl_sync(0xffffffffu, offsets[0], row);
            const int64_t high = __shfl_sync(0xffffffffu, offsets[1], row);
            const char* from = base + (i < 8 ? low : high) + chunk * 16;
            const int num_bytes = ((i < 8 ? votes[0] : votes[1]) >> row % 32 & 1) * 16;
            const uint32_t to = smem_address(blocks) + swizzled<128>(row, chunk);
#pragma unroll
            for (int block = 0; block < NUM; ++block) {
                cp_async_16(to + block * BLOCK_BYTES, from + block * 128, num_bytes, policy);
            }
        }
    }

    // Copies this warp's rows of the item's queries, as one group; those past its rows become zeros.
    __device__ __forceinline__ void load_queries(const Item& item, int block) {
        constexpr int KIND = is_same<KV, half> ? KIND_HALF : KIND_BFLOAT16;
        const int lane_idx = threadIdx.x % WARP_SIZE;
        const bool copies =
            p.q_nope_rows.kind == KIND && p.q_nope_rows.aligned && p.q_pe_rows.aligned;
#pragma unroll 1
        for (int i = 0; i < 16; ++i) {
            const int row = warp_idx * 16 + i;
            const LatentRow at(p, item, block, row);
            const char* q_nope = p.q_nope + (at.owned ? p.q_nope_rows.offset(at.at) : 0);
            const char* q_pe = p.q_pe + (at.owned ? p.q_pe_rows.offset(at.at) : 0);
#pragma unroll 1
            for (int chunk = lane_idx; chunk < LATENT_BLOCKS * 8; chunk += WARP_SIZE) {
                const bool is_pe = chunk / 8 == KPE_BLOCK;
                const QueryRows& rows = is_pe ? p.q_pe_rows : p.q_nope_rows;
                const int feat = is_pe ? chunk % 8 * 8 : chunk * 8;
                const char* from = (is_pe ? q_pe : q_nope) + feat * element_bytes(rows.kind);
                char* to = smem.q[chunk / 8] + swizzled<128>(row, chunk % 8);
                if (copies) {
                    cp_async_16(
                        smem_address(to), from, at.owned * 16, createpolicy_evict_unchanged());
                    continue;
                }
                Query8 x;
                x.bits = uint4{};
                if (at.owned) {
                    x.load(from, rows.kind, rows.aligned);
                }
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
        }
        cp_async_commit_group();
    }
};

}  // namespace cukv
