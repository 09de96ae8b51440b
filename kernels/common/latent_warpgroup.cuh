// The two warpgroups of Hopper's kernel over latent rows that compute: how they share a tile of 64
// rows, step by step, and how its results go out.
//
// Warpgroup g scores the steps 2 i + g of an item and adds up columns [256 g, 256 (g + 1)) of all
// steps. Tiles, barriers and who else is there: common/latent_sm90.cuh.
#pragma once
#include "common/latent_fp8_queries.cuh"
#include "common/latent_weights.cuh"
#include "common/products.cuh"
#include "common/ptx_wgmma.cuh"

namespace cukv {

constexpr int NUM_CONSUMERS = 256, NUM_PRODUCERS = 128;  // threads

__device__ __forceinline__ void consumers_sync() { bar_sync<1>(NUM_CONSUMERS); }

// A thread of the two warpgroups that compute. It holds, of rows `row` and `row` + 8 of a tile, the
// weights of 64 keys and two runs of 128 columns of sums.
template <typename CKV, typename KPE>
struct LatentConsumer : LatentWeights {
    using KV = Operand<CKV>;  // of values too
    using Smem = typename Select<is_fp8<CKV>, LatentFp8Smem, LatentSmem>::type;
    using TileSlots = LatentSlots<KV, LATENT_ROWS, HEAD_DIM_CKV / 2>;

    const LatentParams& p;
    Smem& smem;
    const int group;  // of two
    const int row;
    const float scale;                 // of scores to base 2
    float s_pe[is_fp8<CKV> ? 32 : 1];  // scores of kpe, where they are apart
    float o[2][64];
    uint32_t parity, w_parity;  // of this warpgroup's own tile; of the other's weights

    __device__ __forceinline__ LatentConsumer(const LatentParams& p, Smem& smem, int warp_idx)
        : LatentWeights(score_scale(p)),
          p(p),
          smem(smem),
          group(warp_idx >= 4),  // not by a division: the compiler knows it to be 0 or 1
          row(threadIdx.x / WARP_SIZE % 4 * 16 + threadIdx.x % WARP_SIZE / 4),
          scale(score_scale(p)),
          parity(0),
          w_parity(0) {}

    // Scales that rows have for themselves are applied before.
    static __device__ __forceinline__ float score_scale(const LatentParams& p) {
        return is_fp8<CKV> ? 1.0f : p.sm_scale * LOG2_E;
    }

    // Starts scoring the columns of one block of the own tile.
    __device__ __forceinline__ void score_block(int block) {
        if (block % 2 == 0 && block != KPE_BLOCK) {
            mbarrier_try_wait(smem.full[group][block / 4][block / 2 % 2], parity);
        }
        const uint64_t q = wgmma_descriptor(smem_address(smem.q[block]), 16, 1024);
        const uint64_t k = wgmma_descriptor(smem_address(smem.tiles[group][block]), 16, 1024);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (is_fp8<CKV>) {
                if (block == KPE_BLOCK) {
                    wgmma_m64n64k16<Operand<KPE>>(s_pe, q + 2 * i, k + 2 * i, i > 0);
                    continue;
                }
            }
            wgmma_m64n64k16<KV>(s, q + 2 * i, k + 2 * i, block > 0 || i > 0);
        }
    }

    // Scores the own tile, whose first EARLY blocks were begun.
    template <int EARLY>
    __device__ __forceinline__ void score(const Item& item, int32_t token, bool is_last) {
#pragma unroll
        for (int block = EARLY; block < LATENT_BLOCKS; ++block) {
            score_block(block);
        }
        wgmma_commit_group();
        if (group == 0) {
            arrive(smem.even_scored);
        }
        // While the products run: whether all rows see all of the tile's keys.
        const uint64_t keys = smem.keys[group];
        const bool masked =
            keys != ~uint64_t{0} || token + LATENT_TOKENS > LatentSight(p, item).all_to;
        wgmma_wait_group<0>();
        pin_registers(s);
        pin_sums();
        parity ^= 1;
        if constexpr (is_fp8<CKV>) {
            pin_registers(s_pe);
            join(s_pe, {smem.scales[row], smem.scales[row + 8]});
        }
        if (is_last) {
            arrive(smem.q_empty);
        }
        apply(scale);
        if (!masked) {
            return;
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int local = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            const bool seen = (keys >> local & 1) &&
                              token + local <= LatentSight::last(p, item, row + i / 2 % 2 * 8);
            s[i] = seen ? s[i] : NO_KEY;
        }
    }

    // Gives weights and maxima to the other warpgroup.
    __device__ __forceinline__ void send() {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        const int to_row = threadIdx.x / WARP_SIZE % 4 * 16 + lane_idx % 16;
        bar_sync(2 + group, NUM_CONSUMERS / 2);  // all four warps' scores have read what they cover
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t pairs[4] = {
                pair(4 * i), pair(4 * i + 1), pair(4 * i + 2), pair(4 * i + 3)};
            stmatrix_x4(
                smem_address(smem.tiles[group][KPE_BLOCK]) +
                    swizzled<128>(to_row, 2 * i + lane_idx / 16),
                pairs);
        }
        if (lane_idx % 4 == 0) {
            smem.maxima[group][row] = m[0];
            smem.maxima[group][row + 8] = m[1];
        }
        fence_proxy_async();
        arrive(smem.weights_full[group]);
    }

    // Waits for the other warpgroup's weights and takes over its maxima.
    __device__ __forceinline__ void receive() {
        mbarrier_try_wait(smem.weights_full[group ^ 1], w_parity);
        w_parity ^= 1;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float other = smem.maxima[group ^ 1][row + 8 * h];
            factor[h] = ex2(m[h] - base(other));
            m[h] = other;
            d[h] *= factor[h];
        }
    }

    // Weights of two neighbouring keys as operands.
    __device__ __forceinline__ uint32_t pair(int i) const {
        return cvt_pair<KV>(s[2 * i], s[2 * i + 1]);
    }

    __device__ __forceinline__ void pin_sums() {
        pin_registers(o[0]);
        pin_registers(o[1]);
    }

    // Lets sums follow the maxima.
    __device__ __forceinline__ void rescale() {
        if (__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < 128; ++i) {
                o[i / 64][i % 64] *= factor[i / 2 % 2];
            }
        }
        pin_sums();
        wgmma_fence();
    }

    // Starts adding up the own columns of the own tile, with weights from registers.
    __device__ __forceinline__ void add_own(const uint32_t (&weights)[4][4]) {
#pragma unroll
        for (int run = 0; run < 2; ++run) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                wgmma_m64n128k16<KV>(o[run], weights[i], values(group, run) + 128 * i, true);
            }
            wgmma_commit_group();
        }
    }

    // The same of the other warpgroup's tile, with its weights.
    __device__ __forceinline__ void add_other() {
        const uint32_t from = smem_address(smem.tiles[group ^ 1][KPE_BLOCK]);
        const uint64_t weights = wgmma_descriptor(from, 16, 1024);
#pragma unroll
        for (int run = 0; run < 2; ++run) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                wgmma_m64n128k16<KV>(
                    o[run], weights + 2 * i, values(group ^ 1, run) + 128 * i, true);
            }
            wgmma_commit_group();
        }
    }

    __device__ __forceinline__ uint64_t values(int stage, int run) const {
        const uint32_t from = smem_address(smem.tiles[stage][group * 4 + run * 2]);
        return wgmma_descriptor(from, BLOCK_BYTES, 1024);
    }

    // Waits until a tile has been added up, and frees its side.
    __device__ __forceinline__ void added(int stage) {
        wgmma_wait_group<0>();
        pin_sums();
        arrive(smem.empty[stage][group]);
    }

    __device__ __forceinline__ void begin_scores() {
        pin_registers(s);
        if constexpr (is_fp8<CKV>) {
            pin_registers(s_pe);
        }
        wgmma_fence();
    }

    // The weights of the own tile as left operands.
    __device__ __forceinline__ void get_weights(uint32_t (&weights)[4][4]) const {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            weights[i / 4][i % 4] = pair(i);
        }
    }

    // All steps of an item, by warpgroup 0. It begins to score a tile while the one before is still
    // added up, so that its own tile is never free for long.
    __device__ __forceinline__ void attend_even(const Item& item, int32_t steps) {
        int32_t step = 0;
        for (; step + 1 < steps; step += 2) {
            attend_own_even(item, step, steps);
            added(0);
            receive();
            rescale();
            add_other();
        }
        // Not a branch inside the loop: the compiler would run products one after the other.
        if (step < steps) {
            attend_own_even(item, step, steps);
            added(0);
        } else {
            added(1);
        }
    }

    __device__ __forceinline__ void attend_own_even(const Item& item, int32_t step, int32_t steps) {
        begin_scores();
        score_block(0);
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (step > 0) {
            arrive(smem.empty[1][0]);
        }
        score<1>(item, item.first_token + step * LATENT_TOKENS, step + 2 >= steps);
        weigh();
        send();
        uint32_t weights[4][4];
        get_weights(weights);
        rescale();
        add_own(weights);
    }

    // The same by warpgroup 1. It lets the products of the even tile's scores go first: the tensor
    // cores then work on the odd tile's while warpgroup 0 weighs.
    __device__ __forceinline__ void attend_odd(const Item& item, int32_t steps) {
        int32_t step = 1;
        for (; step < steps; step += 2) {
            begin_scores();
            mbarrier_try_wait(smem.even_scored, w_parity);
            score<0>(item, item.first_token + step * LATENT_TOKENS, step + 2 >= steps);
            receive();
            rescale();
            weigh();
            send();
            add_other();
            added(0);
            pin_registers(s);
            uint32_t weights[4][4];
            get_weights(weights);
            rescale();
            add_own(weights);
            added(1);
        }
        if (step == steps) {
            mbarrier_try_wait(smem.even_scored, w_parity);
            receive();
            rescale();
            add_other();
            added(0);
            pin_registers(s);  // as behind the loop: else registers change places, and spill
        }
        if (steps == 1) {
            arrive(smem.q_empty);
        }
    }

    // The result of an item, or a slot's state if the tile has others.
    __device__ __forceinline__ void finish(const Item& item, int block, int turn) {
        auto& denominators = smem.denominators[turn];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            d[h] += __shfl_xor_sync(0xffffffffu, d[h], 1);
            d[h] += __shfl_xor_sync(0xffffffffu, d[h], 2);
            if (threadIdx.x % 4 == 0) {
                denominators[group][row + 8 * h] = d[h];
            }
        }
        consumers_sync();  // denominators are there
        const auto each_vector = [&](int h, auto visit) {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float* even = &o[i / 8][i % 8 * 8 + 2 * h];
                float sums[4];
                const int feat = opaque(neighbours<KV>(sums, even, even + 4));
                visit(sums, group * 256 + i * 16 + feat);
            }
        };
        const bool is_first = group == 0 && threadIdx.x % 4 == 0;
        float all[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            all[h] = d[h] + denominators[group ^ 1][row + 8 * h];
        }
        if (item.first_slot < 0) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const LatentRow to(p, item, block, row + 8 * h);
                to.template store<4>(
                    LatentRow::factor(p, all[h]), [&](auto visit) { each_vector(h, visit); });
                if (is_first) {
                    to.store_lse(m[h], all[h]);
                }
            }
            return;
        }
        pin_sums();  // else the compiler works on them beside products, and spills
        const TileSlots slots{{p.work, item, block}};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            slots.store(row + 8 * h, group, [&](int tile, int i) {
                return o[tile / 16][tile % 16 * 4 + 2 * h + i];
            });
            if (is_first) {
                slots.slots.store_state(m[h], all[h], row + 8 * h);
            }
        }
    }

    __device__ __forceinline__ void run(int block, int part) {
        const int32_t first_item = p.work.part_begin[part], end_item = p.work.part_end[part];
        for (int32_t item_idx = first_item; item_idx < end_item; ++item_idx) {
            const int turn = item_idx - first_item & 1;
            mbarrier_try_wait(smem.q_full, turn);
            const Item& item = smem.items[turn];
            if constexpr (is_fp8<CKV>) {
                load_latent_fp8_queries<KPE, NUM_CONSUMERS / WARP_SIZE>(p, smem, item, block);
                fence_proxy_async();
                consumers_sync();  // queries are there
            }
            const int32_t steps =
                (item.end_token - item.first_token + LATENT_TOKENS - 1) / LATENT_TOKENS;
            m[0] = m[1] = NO_KEY;
            d[0] = d[1] = 0.0f;
            // Not by the first product: the compiler would run all of them one after the other.
#pragma unroll
            for (int i = 0; i < 128; ++i) {
                o[i / 64][i % 64] = 0.0f;
            }
            if (steps == 0) {
                arrive(smem.q_empty);
            } else if (group == 0) {
                attend_even(item, steps);
            } else {
                attend_odd(item, steps);
            }
            finish(item, block, turn);
            consumers_sync();  // the slot is written, if there is one
            if (threadIdx.x == 0) {
                smem.gates[item_idx > first_item].arrive(p.work, item, block);
            }
        }

        // Shares of the tiles that other CTAs work on too: only the first and the last item's.
        const int num_gates = min(end_item - first_item, 2);
#pragma unroll 1
        for (int i = 0; i < num_gates; ++i) {
            auto& gate = smem.gates[i];
            if (threadIdx.x == 0) {
                gate.wait(p.work, block);
            }
            consumers_sync();  // the slots are there, and tiles have been read
            const auto sync = [] { consumers_sync(); };
            using Merge = LatentMerge<TileSlots, NUM_CONSUMERS, decltype(sync)>;
            static_assert(sizeof(smem.tiles) >= sizeof(typename Merge::Scratch), "tiles are free");
            auto& scratch = reinterpret_cast<typename Merge::Scratch&>(smem.tiles);
            Merge{p, gate.item, block, static_cast<int>(threadIdx.x), scratch, sync}.merge(
                gate.shares);
        }
    }
};

}  // namespace cukv
