// What the warps of a CTA make of a step of latent rows, whoever has copied it, and of an item.
//
// Of a step each warp weighs 8 keys, and then, with the weights of all keys, adds up its share of
// the features. Weights are relative to maxima of earlier steps, so that nothing but weights goes
// between warps while these maxima are high enough.
#pragma once
#include "common/latent_merge.cuh"
#include "common/latent_queries.cuh"
#include "common/logits.cuh"

namespace cukv {

constexpr int WEIGHT_ROW_BYTES = 128;

// s = q k^T for the 8 keys at `keys`, whose lines of 128 bytes are LINE_STRIDE apart. Products that
// all add to one sum would wait for each other: there are CHAINS sums.
template <int LINE_STRIDE, int CHAINS, typename KV, int K_STEPS, int HELD>
__device__ __forceinline__ void multiply_latent_keys(
    float (&s)[4], const HeldQueries<KV, K_STEPS, HELD>& queries, uint32_t keys) {
    using Chunks = KeyChunks<KV>;
    constexpr int LOADS = 8 / 4;  // of the chunks of a line
    float part[CHAINS][4] = {};
#pragma unroll
    for (int i = 0; i < K_STEPS / Chunks::K_STEPS; ++i) {
        if (is_fp8<KV> && i % 2 == 0) {
            __syncwarp();  // keeps the compiler from loading all chunks first, and spilling
        }
        Chunks b;
        b.template load<128>(keys + i / LOADS * LINE_STRIDE, i % LOADS);
#pragma unroll
        for (int j = 0; j < Chunks::K_STEPS; ++j) {
            const int k_step = i * Chunks::K_STEPS + j;
            const OperandPair pair = b[j];
            uint32_t a[4];
            queries.get(a, k_step);
            mma_m16n8k16<Operand<KV>>(part[k_step % CHAINS], a, pair.b0, pair.b1);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        s[i] = part[0][i];
#pragma unroll
        for (int chain = 1; chain < CHAINS; ++chain) {
            s[i] += part[chain][i];
        }
    }
}

template <int NUM>
__device__ __forceinline__ float largest_of(const float (&x)[NUM]) {
    float largest[NUM];
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        largest[i] = x[i];
    }
#pragma unroll
    for (int n = NUM / 2; n > 0; n /= 2) {
#pragma unroll
        for (int i = 0; i < n; ++i) {
            largest[i] = fmaxf(largest[i], largest[i + n]);
        }
    }
    return largest[0];
}

// A warp of those that share steps, in an item. Cta: Ring, the operands NopeQueries and PeQueries,
// and Smem with weights, maxima and scales; its sync() is a barrier of these warps.
template <typename Cta>
struct LatentWarp {
    using Ring = typename Cta::Ring;
    using CKV = typename Ring::CKV;
    static constexpr int WARPS = Ring::WARPS, FEATS = HEAD_DIM_CKV / WARPS;
    using TileSlots = LatentSlots<CKV, Cta::ROWS, FEATS>;

    const LatentParams& p;
    typename Cta::Smem& smem;
    const int warp_idx = threadIdx.x / WARP_SIZE, lane_idx = threadIdx.x % WARP_SIZE;
    const int row = lane_row(0, 0);  // of a tile, and row + 8
    LatentState<FEATS / 8> state;
    float s[1][1][4], weights[4];
    int turn = 0;  // of the buffers of weights

    __device__ __forceinline__ LatentWarp(const LatentParams& p, typename Cta::Smem& smem)
        : p(p), smem(smem) {}

    // Weighs the warp's own keys of a step, the first of which is `first`; tells whether maxima
    // have to rise before.
    __device__ __forceinline__ bool weigh_keys(
        const typename Cta::NopeQueries& q_nope,
        const typename Cta::PeQueries& q_pe,
        const typename Ring::Buffer& buffer,
        uint32_t keys,
        int32_t first,
        const LatentSight& sight,
        const Item& item) {
        float s_pe[4];
        multiply_latent_keys<Ring::LINE_STRIDE, 4>(
            s[0][0], q_nope, smem_address(buffer.ckv) + warp_idx * Ring::GROUP_STRIDE);
        multiply_latent_keys<0, 1>(
            s_pe, q_pe, smem_address(buffer.kpe) + warp_idx * (Ring::OWN_TOKENS * 128));
        each_score(s, [&](float& x, int, int half_idx, int, int column) {
            const float2 scales = smem.scales[row + half_idx * 8];
            x = fmaf(x, scales.x, s_pe[half_idx * 2 + column % 2] * scales.y);
        });
        if (keys != 0xff || first + Ring::OWN_TOKENS > sight.all_to) {
            const int32_t last[2] = {
                LatentSight::last(p, item, row) - first,
                LatentSight::last(p, item, row + 8) - first};
            each_score(s, [&](float& x, int, int half_idx, int, int local) {
                x = (keys >> local & 1) && local <= last[half_idx] ? x : NO_KEY;
            });
        }
        const bool rises = state.weigh(weights, s[0][0]);
        put_weights();
        return rises;
    }

    __device__ __forceinline__ void put_weights() const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            char* to = smem.weights[turn] + swizzled<WEIGHT_ROW_BYTES>(row + i * 8, warp_idx);
            *reinterpret_cast<uint32_t*>(to + lane_idx % 4 * 4) =
                cvt_pair<Operand<CKV>>(weights[2 * i], weights[2 * i + 1]);
        }
    }

    // Lets maxima rise, and weighs again. By all warps.
    __device__ __forceinline__ void raise() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float m = row_maximum(s[0][0], i);
            if (lane_idx % 4 == 0) {
                smem.maxima[row + i * 8][warp_idx] = m;
            }
        }
        Cta::sync();  // maxima are there
        state.raise({largest_of(smem.maxima[row]), largest_of(smem.maxima[row + 8])});
        state.weigh(weights, s[0][0]);
        put_weights();
        Cta::sync();  // weights are there again
    }

    // Weights of all keys of the step, times their values.
    __device__ __forceinline__ void add_values(const typename Ring::Buffer& buffer) {
        state.add_weights(weights);
        constexpr int LINE_FEATS = 128 / sizeof(CKV);
        const int first_feat = warp_idx * FEATS;
        multiply_latent_values<CKV, Ring::GROUP_STRIDE / 8, Ring::TOKENS>(
            state.o[0], smem_address(smem.weights[turn]),
            smem_address(buffer.ckv) + first_feat / LINE_FEATS * Ring::LINE_STRIDE,
            first_feat % LINE_FEATS / 8);
        turn ^= 1;
    }

    // Stores the result, or a slot's state if the tile has other items.
    __device__ __forceinline__ void finish(const Item& item, int block) {
        float d[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float own_d = state.whole_d(0, i);
            if (lane_idx % 4 == 0) {
                smem.maxima[row + i * 8][warp_idx] = own_d;
            }
        }
        Cta::sync();  // denominators are there
        const bool whole = item.first_slot < 0;
        const TileSlots slots{{p.work, item, block}};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            d[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < WARPS; ++j) {
                d[i] += smem.maxima[row + i * 8][j];
            }
            if (warp_idx == 0 && lane_idx % 4 == 0 && !whole) {
                slots.slots.store_state(state.m[0][i], d[i], row + i * 8);
            }
            if (whole) {
                const LatentRow to(p, item, block, row + i * 8);
                to.template store<4>(LatentRow::factor(p, d[i]), [&](auto visit) {
                    state.template each_vector<CKV>(0, i, [&](const float (&sums)[4], int feat) {
                        visit(sums, warp_idx * FEATS + feat);
                    });
                });
                if (warp_idx == 0 && lane_idx % 4 == 0) {
                    to.store_lse(state.m[0][i], d[i]);
                }
            } else {
                slots.store(row + i * 8, warp_idx, [&](int tile, int column) {
                    return state.o[0][tile][2 * i + column];
                });
            }
        }
    }
};

// Merges this CTA's shares of the tiles that other CTAs work on too, only the first and the last of
// its items', by the warps of Cta::sync; `scratch` is free.
template <typename Cta, typename Scratch>
__device__ __forceinline__ void merge_latent_shares(
    const LatentParams& p, Gate (&gates)[2], int num_items, int block, Scratch& scratch_bytes) {
    const auto sync = [] { Cta::sync(); };
    constexpr int THREADS = Cta::Ring::WARPS * WARP_SIZE;
    using Merge = LatentMerge<typename LatentWarp<Cta>::TileSlots, THREADS, decltype(sync)>;
    static_assert(sizeof(Scratch) >= sizeof(typename Merge::Scratch), "there is room");
    auto& scratch = reinterpret_cast<typename Merge::Scratch&>(scratch_bytes);
    const int num_gates = min(num_items, 2);
#pragma unroll 1
    for (int i = 0; i < num_gates; ++i) {
        if (threadIdx.x == 0) {
            gates[i].wait(p.work, block);
        }
        Cta::sync();  // the slots are there
        Merge{p, gates[i].item, block, static_cast<int>(threadIdx.x), scratch, sync}.merge(
            gates[i].shares);
    }
}

}  // namespace cukv
