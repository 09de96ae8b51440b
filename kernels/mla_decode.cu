// mla_decode -- attend from a few packed query rows to paged latent rows, item by item of a work
// list.
//
//   s[r, j] = sm_scale * (q_nope[r] . ckv[j] + q_pe[r] . kpe[j]), for the keys j that row r sees
//   o[r] = sum_j softmax(s[r])[j] * ckv[j],  lse[r] = log2(sum_j 2^(s[r, j] * log2(e)))
//
// The query heads of a block, times the query rows of a request, are the rows of a tile of 16. A
// CTA owns one block and one part of the work list; its warps copy a step of TOKENS keys together,
// some steps ahead. Of a step each warp weighs 8 keys, and then, with the weights of all keys, adds
// up its share of the features. Weights are relative to maxima of earlier steps, so that nothing
// but weights goes between warps while these maxima are high enough. Bound by HBM: the latent rows,
// once.
// Host: cukv/mla.py MLAPagedCache.decode       Reference: cukv/reference.py mla_decode
#include "common/latent_ring.cuh"
#include "common/latent_step.cuh"

namespace cukv {

using MlaDecodeParams = LatentParams;

static_assert(
    sizeof(MlaDecodeParams) == PARAMS_BYTES, "host and device disagree on the parameters");

// Geometry of one specialisation, and its shared memory.
template <typename CKV, typename KPE, int WARPS, int STAGES, int HELD>
struct MlaDecodeCta {
    static constexpr int THREADS = WARPS * WARP_SIZE;
    static constexpr int ROWS = 16;

    using Ring = LatentRing<CKV, KPE, WARPS, STAGES>;
    static_assert(2 * Ring::TOKENS <= WEIGHT_ROW_BYTES, "a row of weights is of a step's keys");

    // Whether the next step's scores are worked out beside a step's values, so that warps wait for
    // each other once a step, not twice. It takes a buffer that else were on its way.
    static constexpr bool AHEAD = STAGES > 3;

    // Sums of more than 64 features leave no registers for all queries.
    using Queries = LatentQueryTile<CKV, KPE>;
    using NopeQueries = HeldQueries<CKV, Queries::NOPE_STEPS, HELD>;
    static constexpr int HELD_PE = HELD == Queries::NOPE_STEPS ? Queries::PE_STEPS : 0;
    using PeQueries = HeldQueries<KPE, Queries::PE_STEPS, HELD_PE>;
    static_assert(sizeof(Queries) <= sizeof(typename Ring::Buffer), "they come by way of a buffer");

    struct Smem {
        alignas(1024) typename Ring::Buffers ring;
        char weights[2][ROWS * WEIGHT_ROW_BYTES];  // of steps in turn
        typename NopeQueries::Rest nope_rest;
        typename PeQueries::Rest pe_rest;
        float maxima[ROWS][WARPS];  // of each warp's keys; at the end of an item, denominators
        typename Ring::Keys keys;
        typename Queries::Scales scales;
        Item item;
        int32_t first_item;  // of the part
        bool postponed;      // whether the copies that go with the last step have not begun
        Gate gates[2];       // of the tiles that other CTAs work on too
    };

    static __device__ __forceinline__ void sync() { __syncthreads(); }
};

template <typename CKV, typename KPE, int WARPS, int STAGES, int HELD, int MIN_CTAS, bool ALIGNED>
__global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)
    mla_decode(const __grid_constant__ MlaDecodeParams p) {
    using Cta = MlaDecodeCta<CKV, KPE, WARPS, STAGES, HELD>;
    using Ring = typename Cta::Ring;
    constexpr int TOKENS = Ring::TOKENS;
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<typename Cta::Smem*>(smem_bytes);

    // 1 the CTA's part, and its first queries and keys on their way, of which keys come into the L2
    //   even before earlier launches have ended
    const int block = blockIdx.x % p.work.num_kv_heads;
    const int part = blockIdx.x / p.work.num_kv_heads;
    // As many as are on their way at a time.
    prefetch_first_rows<CKV, KPE, (STAGES - 1) * TOKENS, Cta::THREADS>(p, part);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    Item first = load_item(p.work.first_items + part);
    const int32_t first_item = p.work.part_begin[part], end_item = p.work.part_end[part];
    if (first_item >= end_item) {
        // Not a return yet: the compiler would look up the item behind it.
        first.num_rows = first.first_token = first.end_token = 0;
    }
    LatentLoader<Ring, ALIGNED> loader(p, smem.ring, smem.keys, first, first_item, end_item);
    // Queries before keys: what is asked for behind copies comes behind them, which takes long.
    typename Cta::Queries::template Loader<WARPS> on_way;
    on_way.load(p, first, block);
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        loader.issue(stage);
    }
    if (first_item >= end_item) {
        return;
    }

    const Item& item = smem.item;
    if (threadIdx.x == 0) {
        smem.item = first;
        smem.first_item = first_item;
        smem.postponed = false;
    }
    int stage = 0;
#pragma unroll 1
    for (int32_t item_idx = first_item;;) {
        // 2 queries, by way of the buffer that is filled next
        __syncthreads();  // the item is there
        typename Cta::PeQueries q_pe(smem.pe_rest);
        typename Cta::NopeQueries q_nope(smem.nope_rest);
        if (item.first_token < item.end_token) {
            const bool postponed = smem.postponed;
            const int free = (stage + STAGES - (postponed ? 2 : 1)) % STAGES;
            auto& queries = *reinterpret_cast<typename Cta::Queries*>(&smem.ring[free]);
            on_way.store(queries, p, smem.scales);
            __syncthreads();  // queries are there
            q_pe.load(queries.pe, smem.pe_rest, threadIdx.x < WARP_SIZE);
            q_nope.load(queries.nope, smem.nope_rest, threadIdx.x < WARP_SIZE);
            if (postponed) {
                __syncthreads();  // queries have been read
                loader.issue(free);
            }
            if (threadIdx.x == 0) {
                smem.postponed = true;  // all have read it before the queries were there
            }
        }

        // 3 steps: of one the weights, and then its values and the weights of the next
        const LatentSight sight(p, item);
        LatentWarp<Cta> warp(p, smem);
        bool rises = false;
        const int32_t first_token = item.first_token, end_token = item.end_token;
#pragma unroll 1
        for (int32_t token = first_token - TOKENS; token < end_token; token += TOKENS) {
            const bool scored = token >= first_token, more = token + TOKENS < end_token;
            if constexpr (Cta::AHEAD) {
                if (more && scored) {
                    cp_async_wait_group<STAGES - 3>();
                } else if (more) {
                    cp_async_wait_group<STAGES - 2>();
                }
            }
            if (Cta::AHEAD || scored) {
                // Weights are there, and, if ahead, the next step's keys; the buffer before has
                // been read.
                rises = __syncthreads_or(rises);
            }
            // What copies wait for before they begin takes long, so half of the warps begin theirs
            // while the others multiply.
            const auto issue_by_half = [&](bool second, bool is_needed) {
                if (is_needed && (warp.warp_idx >= WARPS / 2) == second) {
                    loader.issue(stage == 0 ? STAGES - 1 : stage - 1);
                }
            };
            if (scored) {
                issue_by_half(false, Cta::AHEAD && more);
                if (rises) {  // seldom, but for an item's first step
                    warp.raise();
                }
                warp.add_values(smem.ring[stage]);
                issue_by_half(true, Cta::AHEAD && more);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
            }
            if (!more) {
                break;
            }
            const bool copies = !Cta::AHEAD && token + 2 * TOKENS < end_token;
            if constexpr (!Cta::AHEAD) {
                cp_async_wait_group<STAGES - 2>();
                __syncthreads();  // the next step's keys are there, and the buffer before is free
                issue_by_half(false, copies);
            }
            rises = warp.weigh_keys(
                q_nope, q_pe, smem.ring[stage], smem.keys[stage][warp.warp_idx],
                token + TOKENS + warp.warp_idx * Ring::OWN_TOKENS, sight, item);
            issue_by_half(true, copies);
        }

        // 4 the result, or a slot's state if the tile has other items
        warp.finish(item, block);
        __syncthreads();  // the slot is written, the item and the denominators have been read
        if (threadIdx.x == 0) {
            smem.gates[item_idx > smem.first_item].arrive(p.work, item, block);
        }
        if (++item_idx >= end_item) {
            break;
        }
        const Item next = load_item(p.work.items + item_idx);
        on_way.load(p, next, block);
        if (threadIdx.x == 0) {
            smem.item = next;
        }
    }

    // 5 shares of the tiles that other CTAs work on too
    merge_latent_shares<Cta>(p, smem.gates, end_item - smem.first_item, block, smem.ring);
}

}  // namespace cukv
