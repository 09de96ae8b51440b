// Latent rows of e4m3 on Hopper: how they become operands, and the warps that fill tiles with them.
//
// Products take halves, which hold e4m3 exactly. A key's 128 columns of two neighbouring blocks are
// copied as they are, 128 bytes, to its row of the second of these blocks, and from there the lanes
// that have read a row write it to both: a tile needs no room but its own. Warp w of four fills
// blocks 2 w and 2 w + 1 of every tile; rotary parts in 16 bits are copied to where products want
// them, and those of e4m3 to the first half of their rows.
#pragma once
#include "common/latent_sm90.cuh"
#include "common/operands.cuh"

namespace cukv {

struct LatentFp8Smem : LatentSmem {
    float2 scales[LATENT_ROWS];  // of a row's products with ckv and with kpe, to logits to base 2
    uint64_t copied[2][4];       // barriers of tile and of warps that load
};

// One of the four warps that load. MAPPED: as for LatentProducer.
template <typename KPE, bool MAPPED>
struct LatentFp8Producer {
    // The keys of a step, from a token on.
    struct Step {
        int32_t token;
        uint32_t votes[2];  // bit l: whether row l, row WARP_SIZE + l is a key
        int32_t pages[2];   // of these rows of lane l; max_num_pages where there is no key
    };

    const LatentMappedParams& p;
    LatentFp8Smem& smem;
    const int warp_idx;  // of the four
    const uint64_t policy;
    uint32_t parities;  // bit s: of the next phase in which tile s is filled

    __device__ __forceinline__
    LatentFp8Producer(const LatentMappedParams& p, LatentFp8Smem& smem, int warp_idx)
        : p(p),
          smem(smem),
          warp_idx(warp_idx),
          policy(p.evict_first ? createpolicy_evict_first() : createpolicy_evict_unchanged()),
          parities(0) {}

    // By one thread, before the other barriers.
    static __device__ __forceinline__ void init(LatentFp8Smem& smem) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            mbarrier_init(smem.copied[i / 4][i % 4], MAPPED ? 1 : WARP_SIZE);
        }
    }

    __device__ __forceinline__ void run(int, int part) {
        const Item* from = p.work.first_items + part;
        const int32_t first_item = p.work.part_begin[part], end_item = p.work.part_end[part];
        for (int32_t item_idx = first_item; item_idx < end_item; ++item_idx) {
            const Item item = load_item(from);
            const int turn = item_idx - first_item & 1;
            mbarrier_try_wait(smem.q_empty, turn ^ 1);
            if (warp_idx == 0 && threadIdx.x % WARP_SIZE == 0) {
                smem.items[turn] = item;
            }
            arrive(smem.q_full);                      // who computes loads queries
            if (item.first_token < item.end_token) {  // else there may be no page to look up
                load_keys(item);
            }
            from = p.work.items + item_idx + 1;
        }
    }

    // All steps of an item. The next step's copies begin before this one's rows are expanded, if
    // there is room; not those by lanes, which have no registers for both.
    __device__ __forceinline__ void load_keys(const Item& item) {
        Step step = find(item, item.first_token);
        bool begun = false;
        int stage = 0;
        for (int32_t token = item.first_token; token < item.end_token; token += LATENT_TOKENS) {
            if (!begun) {
                mbarrier_try_wait(empty(stage), parity(stage) ^ 1);
                copy(step, stage);
            }
            Step next = step;
            begun = false;
            if (token + LATENT_TOKENS < item.end_token) {
                next = find(item, token + LATENT_TOKENS);  // while the copies are on their way
                if constexpr (MAPPED) {
                    const bool is_free =
                        mbarrier_test_wait(empty(stage ^ 1), parity(stage ^ 1) ^ 1);
                    begun = !__any_sync(0xffffffffu, !is_free);
                    if (begun) {
                        copy(next, stage ^ 1);
                    }
                }
            }
            expand(step, stage);
            step = next;
            stage ^= 1;
        }
    }

    __device__ __forceinline__ uint64_t& empty(int stage) const {
        return smem.empty[stage][warp_idx / 2];
    }

    __device__ __forceinline__ uint32_t parity(int stage) const { return parities >> stage & 1; }

    // Whether this warp copies a tile's rotary parts: their block is free with the side of the
    // warpgroup that reads its weights.
    __device__ __forceinline__ bool has_kpe(int stage) const {
        return warp_idx == (stage == 0 ? 3 : 1);
    }

    // Looks up the keys from `token` on. The page of those past the end is the request's first.
    __device__ __forceinline__ Step find(const Item& item, int32_t token) const {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        IndexEntry ids[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32_t own = token + lane_idx + i * WARP_SIZE;
            const int32_t page_idx = p.table.page_divisor.quotient(own);
            const bool is_past = own >= item.end_token;
            ids[i] = p.table.indices.entry(item.first_page + (is_past ? 0 : page_idx));
        }
        Step step;
        step.token = token;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int64_t id = ids[i].value(p.table.indices);
            const int32_t own = token + lane_idx + i * WARP_SIZE;
            const bool has_key = own < item.end_token && p.ckv.has(id) && p.kpe.has(id);
            step.pages[i] = has_key ? id : p.ckv.max_num_pages;
            step.votes[i] = __ballot_sync(0xffffffffu, has_key);
        }
        return step;
    }

    // Of the token in a row of a step.
    __device__ __forceinline__ int32_t entry(const Step& step, int row) const {
        const uint32_t page_idx = p.table.page_divisor.quotient(step.token + row);
        return step.token + row - page_idx * p.table.page_divisor.divisor;
    }

    // Starts the copies of this warp's share of a tile.
    __device__ __forceinline__ void copy(const Step& step, int stage) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        uint64_t& copied = smem.copied[stage][warp_idx];
        char* ckv = smem.tiles[stage][2 * warp_idx + 1];
        char* kpe = smem.tiles[stage][KPE_BLOCK];
        if (warp_idx == 0 && lane_idx == 0) {
            smem.keys[stage] = uint64_t{step.votes[1]} << 32 | step.votes[0];
        }
        if constexpr (MAPPED) {
            if (lane_idx == 0) {
                mbarrier_arrive_expect_tx(copied, (1 + has_kpe(stage)) * BLOCK_BYTES);
            }
            // A lane's piece begins at a row, if it has one. Maps read pages that are not there as
            // zeros.
            const int row = lane_idx << p.piece_bits;
            const int32_t low = __shfl_sync(0xffffffffu, step.pages[0], row % WARP_SIZE);
            const int32_t high = __shfl_sync(0xffffffffu, step.pages[1], row % WARP_SIZE);
            const int32_t page = row < WARP_SIZE ? low : high, first = entry(step, row);
            __syncwarp();  // the barrier knows of the bytes
            if (row < LATENT_TOKENS) {
                cp_async_bulk_tensor_4d(
                    smem_address(ckv + row * 128), p.ckv_map, copied, 0, first, warp_idx, page,
                    policy);
                if (has_kpe(stage)) {
                    cp_async_bulk_tensor_4d(
                        smem_address(kpe + row * 128), p.kpe_map, copied, 0, first, 0, page,
                        policy);
                }
            }
        } else {
            copy_rows<8>(ckv, p.ckv, warp_idx * 128, step);
            if (has_kpe(stage)) {
                copy_rows<HEAD_DIM_KPE * sizeof(KPE) / 16>(kpe, p.kpe, 0, step);
            }
            cp_async_mbarrier_arrive(copied);
        }
    }

    // CHUNKS times 16 bytes of each of a tile's rows, from a byte of theirs on. Those that are not
    // keys become zeros.
    template <int CHUNKS>
    __device__ __forceinline__ void copy_rows(
        char* block, const Pages& from, int first_byte, const Step& step) {
        constexpr int ROWS = WARP_SIZE / CHUNKS;  // at a time
        const int lane_idx = threadIdx.x % WARP_SIZE, chunk = lane_idx % CHUNKS;
        const uint32_t to = smem_address(block);
#pragma unroll
        for (int half_idx = 0; half_idx < 2; ++half_idx) {
            const uint32_t votes = step.votes[half_idx];
            const bool has_key = votes >> lane_idx & 1;
            const int32_t own = entry(step, half_idx * WARP_SIZE + lane_idx);
            // Both fit into 32 bits, of which the compiler does not know.
            const Slot slot = {
                has_key ? static_cast<uint32_t>(step.pages[half_idx]) : 0,
                has_key ? static_cast<uint32_t>(own) : 0};
            const int64_t own_row = reinterpret_cast<int64_t>(from.row(slot, 0)) + first_byte;
#pragma unroll 2
            for (int i = 0; i < WARP_SIZE / ROWS; ++i) {
                const int row = i * ROWS + lane_idx / CHUNKS;  // of 32
                const int64_t at = __shfl_sync(0xffffffffu, own_row, row) + chunk * 16;
                cp_async_16(
                    to + swizzled<128>(half_idx * WARP_SIZE + row, chunk),
                    reinterpret_cast<const char*>(at), (votes >> row & 1) * 16, policy);
            }
        }
    }

    // Makes operands of this warp's share of a tile, once it has been copied.
    __device__ __forceinline__ void expand(const Step& step, int stage) {
        auto& tile = smem.tiles[stage];
        mbarrier_try_wait(smem.copied[stage][warp_idx], parity(stage));
        parities ^= 1u << stage;
        if (MAPPED && (step.votes[0] & step.votes[1]) != 0xffffffffu) {
            zero_absent(step, stage);
        }
        expand_rows<2>(tile[2 * warp_idx]);
        if (is_fp8<KPE> && has_kpe(stage)) {
            expand_rows<1>(tile[KPE_BLOCK]);
        }
        fence_proxy_async();
        arrive(smem.full[stage][warp_idx / 2][warp_idx % 2]);
    }

    // Zeros copied rows that are not keys: they may hold anything.
    __device__ __forceinline__ void zero_absent(const Step& step, int stage) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        auto& tile = smem.tiles[stage];
        for (int row = lane_idx / 8; row < LATENT_TOKENS; row += WARP_SIZE / 8) {
            if ((row < WARP_SIZE ? step.votes[0] : step.votes[1]) >> row % WARP_SIZE & 1) {
                continue;
            }
            const int at = row * 128 + lane_idx % 8 * 16;
            *reinterpret_cast<uint4*>(tile[2 * warp_idx + 1] + at) = uint4{};
            if (has_kpe(stage)) {
                *reinterpret_cast<uint4*>(tile[KPE_BLOCK] + at) = uint4{};
            }
        }
        __syncwarp();
    }

    // Expands rows of BLOCKS blocks, which lie in the last of them. A lane has 16 columns of a row
    // at a time: 16 bytes, of which neighbours read and write different halves first, so that no
    // two lanes meet at a bank.
    template <int BLOCKS>
    static __device__ __forceinline__ void expand_rows(char* blocks) {
        constexpr int LANES = 4 * BLOCKS, ROWS = WARP_SIZE / LANES;  // of a row; at a time
        constexpr int NUM = 2 * BLOCKS;                              // turns under way
        const int lane_idx = tid_x() % WARP_SIZE;
        const int row = lane_idx / LANES, chunk = lane_idx % LANES;
        const int half_idx = (row ^ chunk / 4) & 1;
        const uint32_t from = (BLOCKS - 1) * BLOCK_BYTES + swizzled<128>(row, chunk) + half_idx * 8;
        const uint32_t to = chunk / 4 * BLOCK_BYTES + swizzled<128>(row, chunk % 4 * 2 + half_idx);
#pragma unroll
        for (int base = 0; base < LATENT_TOKENS; base += NUM * ROWS) {
            uint2 x[NUM][2];
#pragma unroll
            for (int i = 0; i < 2 * NUM; ++i) {
                const uint32_t at = rows_on<128>(from, base + i / 2 * ROWS) ^ i % 2 * 8;
                x[i / 2][i % 2] = *reinterpret_cast<const uint2*>(blocks + at);
            }
            __syncwarp();  // rows have been read
#pragma unroll
            for (int i = 0; i < 2 * NUM; ++i) {
                const auto low = halves_of_four<fp8_e4m3>(x[i / 2][i % 2].x);
                const auto high = halves_of_four<fp8_e4m3>(x[i / 2][i % 2].y);
                const uint32_t at = rows_on<128>(to, base + i / 2 * ROWS) ^ i % 2 * 16;
                *reinterpret_cast<uint4*>(blocks + at) =
                    make_uint4(low.b0, low.b1, high.b0, high.b1);
            }
        }
    }
};

}  // namespace cukv
