// mla_stream_sm90 -- attend from a few packed query rows to paged latent rows of 8 bits, on Hopper.
//
//   s[r, j] = sm_scale * (q_nope[r] . ckv[j] + q_pe[r] . kpe[j]), for the keys j that row r sees
//   o[r] = sum_j softmax(s[r])[j] * ckv[j],  lse[r] = log2(sum_j 2^(s[r, j] * log2(e)))
//
// As mla_decode, but that a warp of its own has the latent rows copied, by tensor maps, so that the
// others do nothing but compute: rows of half the bytes leave them half the time. Bound by HBM: the
// latent rows, once.
// Host: cukv/mla.py MLAPagedCache.decode       Reference: cukv/reference.py mla_decode
#include "common/latent_boxes.cuh"
#include "common/latent_step.cuh"

namespace cukv {

using MlaStreamSm90Params = LatentMappedParams;

static_assert(
    sizeof(MlaStreamSm90Params) == PARAMS_BYTES, "host and device disagree on the parameters");

// Geometry of one specialisation, and its shared memory.
template <typename CKV, typename KPE, int WARPS, int STAGES, int HELD>
struct MlaStreamSm90Cta {
    static constexpr int COMPUTING = WARPS * WARP_SIZE;        // threads
    static constexpr int THREADS = COMPUTING + 4 * WARP_SIZE;  // registers go by four warps
    static constexpr int SPARE = THREADS - COMPUTING - WARP_SIZE;
    static constexpr int ROWS = 16;

    using Ring = LatentBoxes<CKV, KPE, WARPS, STAGES>;
    static_assert(2 * Ring::TOKENS <= WEIGHT_ROW_BYTES, "a row of weights is of a step's keys");

    using Queries = LatentQueryTile<CKV, KPE>;
    using NopeQueries = HeldQueries<CKV, Queries::NOPE_STEPS, HELD>;
    static constexpr int HELD_PE = HELD == Queries::NOPE_STEPS ? Queries::PE_STEPS : 0;
    using PeQueries = HeldQueries<KPE, Queries::PE_STEPS, HELD_PE>;

    struct Smem {
        alignas(1024) Ring boxes;
        alignas(128) char weights[2][ROWS * WEIGHT_ROW_BYTES];  // of steps in turn
        Queries queries;
        typename NopeQueries::Rest nope_rest;
        typename PeQueries::Rest pe_rest;
        float maxima[ROWS][WARPS];  // of each warp's keys; at the end of an item, denominators
        typename Queries::Scales scales;
        Item item;
        int32_t first_item;  // of the part
        Gate gates[2];       // of the tiles that other CTAs work on too
    };

    // Of the warps that compute.
    static __device__ __forceinline__ void sync() { bar_sync<1>(COMPUTING); }
};

// What the warps that compute do with a part, behind earlier launches.
template <typename Cta>
__device__ __forceinline__ void attend_part(
    const LatentParams& p, typename Cta::Smem& smem, int block, int part) {
    constexpr int TOKENS = Cta::Ring::TOKENS, WARPS = Cta::Ring::WARPS;
    // 1 the CTA's part, and its first queries on their way
    Item first = load_item(p.work.first_items + part);
    const int32_t first_item = p.work.part_begin[part], end_item = p.work.part_end[part];
    if (first_item >= end_item) {
        // Not a return yet: the compiler would look up the item behind it.
        first.num_rows = first.first_token = first.end_token = 0;
    }
    typename Cta::Queries::template Loader<WARPS> on_way;
    on_way.load(p, first, block);
    if (first_item >= end_item) {
        return;
    }

    const Item& item = smem.item;
    if (threadIdx.x == 0) {
        smem.item = first;
        smem.first_item = first_item;
    }
    RingPlace<Cta::Ring::STAGES> next;  // step to be weighed
    int stage = 0;                      // of the step that is weighed
#pragma unroll 1
    for (int32_t item_idx = first_item;;) {
        // 2 queries
        Cta::sync();  // the item is there
        typename Cta::PeQueries q_pe(smem.pe_rest);
        typename Cta::NopeQueries q_nope(smem.nope_rest);
        if (item.first_token < item.end_token) {
            on_way.store(smem.queries, p, smem.scales);
            Cta::sync();  // queries are there
            q_pe.load(smem.queries.pe, smem.pe_rest, threadIdx.x < WARP_SIZE);
            q_nope.load(smem.queries.nope, smem.nope_rest, threadIdx.x < WARP_SIZE);
        }

        // 3 steps: of one the values, and then the weights of the next
        const LatentSight sight(p, item);
        LatentWarp<Cta> warp(p, smem);
        bool rises = false;
        const int32_t first_token = item.first_token, end_token = item.end_token;
#pragma unroll 1
        for (int32_t token = first_token - TOKENS; token < end_token; token += TOKENS) {
            rises = bar_red_or<1>(Cta::COMPUTING, rises);  // weights are there
            if (token >= first_token) {
                if (rises) {  // seldom, but for an item's first step
                    warp.raise();
                }
                warp.add_values(smem.boxes.buffers[stage]);
                smem.boxes.release(stage);
            }
            if (token + TOKENS >= end_token) {
                break;
            }
            smem.boxes.wait(next, end_token - token - TOKENS);
            stage = next.stage;
            next.next();
            rises = warp.weigh_keys(
                q_nope, q_pe, smem.boxes.buffers[stage], smem.boxes.keys[stage][warp.warp_idx],
                token + TOKENS + warp.warp_idx * Cta::Ring::OWN_TOKENS, sight, item);
        }

        // 4 the result, or a slot's state if the tile has other items
        warp.finish(item, block);
        Cta::sync();  // the slot is written, the item and the denominators have been read
        if (threadIdx.x == 0) {
            smem.gates[item_idx > smem.first_item].arrive(p.work, item, block);
        }
        if (++item_idx >= end_item) {
            break;
        }
        const Item following = load_item(p.work.items + item_idx);
        on_way.load(p, following, block);
        if (threadIdx.x == 0) {
            smem.item = following;
        }
    }

    // 5 shares of the tiles that other CTAs work on too
    merge_latent_shares<Cta>(p, smem.gates, end_item - smem.first_item, block, smem.boxes.buffers);
}

template <typename CKV, typename KPE, int WARPS, int STAGES, int HELD>
__global__ void __launch_bounds__(WARPS * 32 + 128, 1)
    mla_stream_sm90(const __grid_constant__ MlaStreamSm90Params p) {
    using Cta = MlaStreamSm90Cta<CKV, KPE, WARPS, STAGES, HELD>;
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<typename Cta::Smem*>(smem_bytes);
    const int block = blockIdx.x % p.work.num_kv_heads;
    const int part = blockIdx.x / p.work.num_kv_heads;
    if (threadIdx.x == 0) {
        smem.boxes.init();
        prefetch_tensormap(p.ckv_map);
        prefetch_tensormap(p.kpe_map);
    }
    __syncthreads();  // barriers are there
    // From one lane, so that the compiler knows: a warp takes one branch.
    const int warp_idx = __shfl_sync(0xffffffffu, threadIdx.x / WARP_SIZE, 0);
    if (warp_idx < WARPS) {
        setmaxnreg_inc<232>();  // with the others': 384 threads began with 168 each
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        attend_part<Cta>(p, smem, block, part);
    } else {
        setmaxnreg_dec<40>();
        if (warp_idx == WARPS) {
            griddepcontrol_wait();
            LatentBoxServer<typename Cta::Ring>(p, smem.boxes).run(part);
        } else {
            // By those who do nothing else: where a CTA begins late, queries do not wait for it.
            prefetch_first_rows<CKV, KPE, (STAGES - 1) * Cta::Ring::TOKENS, Cta::SPARE>(
                p, part, threadIdx.x - (Cta::THREADS - Cta::SPARE));
        }
    }
}

}  // namespace cukv
