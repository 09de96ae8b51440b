// decode -- attend from tiles of packed query rows to paged keys, item by item of a work list.
//
//   s[r, j] = sm_scale * q[r] . k[j] (soft-capped), for the keys j of the item that row r sees
//   o[r] = sum_j softmax(s[r])[j] * v[j],  lse[r] = log2(sum_j 2^(s[r, j] * log2(e)))
//
// The query heads of a KV head, times the query rows of a request, are the rows of a tile of at
// most ROWS. A CTA owns one KV head and one part of the work list. Warp w takes every WARPS-th step
// of TOKENS keys of the part through a ring of buffers of its own, so that loads run ahead across
// items; with one buffer they do not, and the SM's other CTAs load meanwhile. The warps' states
// merge in shared memory at the end of each item, and the states of a tile of several items in the
// CTA that finishes last.
// Bound by HBM: the K and V rows of one KV head, once. The CTAs of all KV heads walk side by side,
// so that the heads of an NHD page are read close in time.
// Host: cukv/paged.py PagedKVCache.decode, PagedKVCache.prefill
// Reference: cukv/reference.py decode
#include "common/attention.cuh"
#include "common/kv_ring.cuh"
#include "common/logits.cuh"
#include "common/slots.cuh"
#include "common/warp_states.cuh"

namespace cukv {

using DecodeParams = AttentionParams;

static_assert(sizeof(DecodeParams) == PARAMS_BYTES, "host and device disagree on the parameters");

// The parameters of a plain call, which here is not causal and has a third less code, or as given.
template <bool PLAIN, typename KV, int HEAD_DIM_QK, int HEAD_DIM_VO>
__device__ __forceinline__ decltype(auto) params_of(const DecodeParams& given) {
    if constexpr (PLAIN) {
        DecodeParams p = plain_params<KV, HEAD_DIM_QK, HEAD_DIM_VO>(given);
        p.causal = 0;
        return p;
    } else {
        return (given);
    }
}

// Geometry of one specialisation, and its shared memory.
template <
    typename KV,
    int HEAD_DIM_QK,
    int HEAD_DIM_VO,
    int ROWS,
    int WARPS,
    int TOKENS,
    int STAGES,
    bool ALIGNED>
struct DecodeCta {
    static constexpr int THREADS = WARPS * WARP_SIZE;
    // There are registers for the queries of this item.
    static constexpr bool Q_STAYS = ROWS <= 16 && HEAD_DIM_QK <= 128;

    // There are registers for all values of a step: then its buffer is filled again before they
    // are multiplied.
    static constexpr bool V_STAYS = !is_fp8<KV> && STAGES > 1 && ROWS <= 16 && HEAD_DIM_VO <= 128;

    // A tile of one buffer is for leaves, whose launch has nothing to wait for before it begins.
    static constexpr bool LOOKS_EARLY = ALIGNED && STAGES > 1;

    static_assert((WARPS & (WARPS - 1)) == 0, "steps are dealt round robin");

    using Ring = KvRing<KV, HEAD_DIM_QK, HEAD_DIM_VO, TOKENS, STAGES, WARPS>;
    // Rows beyond a tile read the same keys again.
    static constexpr bool EVICT_FIRST = ROWS <= 16;
    using Loader = KvLoader<Ring, ALIGNED, EVICT_FIRST, DecodeParams>;
    using Queries = QueryLoader<KV, HEAD_DIM_QK, ROWS, THREADS>;
    using Operands = SwappedQueries<KV, HEAD_DIM_QK, ROWS, Q_STAYS>;
    using Scores = SwappedScores<ROWS, TOKENS>;
    using Warp = SwappedState<KV, ROWS, HEAD_DIM_VO>;
    using Values = SwappedValues<KV, Ring::V_ROW_BYTES, HEAD_DIM_VO / 16, TOKENS, V_STAYS>;

    // Buffers begin at multiples of 1024 bytes: with 16 the copies into them lose 10 % and more.
    struct Smem {
        alignas(1024) typename Ring::Buffers ring[WARPS];
        WarpStates<WARPS, ROWS, HEAD_DIM_VO> states;
        QueryTile<KV, HEAD_DIM_QK, ROWS> q[2];  // of this item and of the next
        typename Ring::RowStarts rows[WARPS];
        typename Ring::Keys keys[WARPS];
        int32_t last;  // whether this CTA has the last ticket
    };

    // Stores four results of a row, and with the first its lse, of sums that get_state() gives, and
    // of what the launch before has left of the row, which is on its way meanwhile.
    template <typename GetState>
    static __device__ __forceinline__ void finish(
        const DecodeParams& p,
        const Item& item,
        int kv_head,
        int row,
        int feat,
        GetState get_state) {
        const PackedRow at(p.group, item, kv_head, row);
        State<1, 4> state;
        if (p.levels.given()) {
            LeftStates left = p.levels.left_of(
                at, item.is_left ? 0 : 1, p.work.num_kv_heads * p.group.divisor, p.head_dim_vo,
                feat);
            left.load();
            state = get_state();
            left.add_to(state);
        } else {
            state = get_state();
        }
        const RowResult<DecodeParams> result(p, at, state.m, state.d);
        result.store(state.o[0], feat);
        if (feat == 0) {
            result.store_lse();
        }
    }

    // Calls visit(row, feat) for this thread's vectors of 4 features of the tile's rows.
    template <typename Visit>
    static __device__ __forceinline__ void each_vector(
        const DecodeParams& p, const Item& item, Visit visit) {
        constexpr int VECS = HEAD_DIM_VO / 4;
        for (int i = threadIdx.x; i < item.num_rows * VECS; i += THREADS) {
            const int row = i / VECS, feat = i % VECS * 4;
            if (feat < p.head_dim_vo) {
                visit(row, feat);
            }
        }
    }

    // Ends an item whose warps' states are in shared memory: finishes the tile if the item is all
    // of it, or else leaves the item's state in its slot, and finishes the tile if it is the last.
    static __device__ __forceinline__ void finish_item(
        const DecodeParams& p, Smem& smem, const Item& item, int kv_head) {
        if (p.inputs_ready) {
            griddepcontrol_wait();
        }
        if (item.first_slot < 0) {
            each_vector(p, item, [&](int row, int feat) {
                finish(p, item, kv_head, row, feat, [&] { return smem.states.merge(row, feat); });
            });
        } else if (item.num_rows > 0) {
            const Slots<ROWS, HEAD_DIM_VO> slots{p.work, item, kv_head};
            each_vector(p, item, [&](int row, int feat) {
                const auto state = smem.states.merge(row, feat);
                slots.store_sums(state.o[0], row, feat);
                if (feat == 0) {
                    slots.store_state(state.m, state.d, row);
                }
            });
            if (slots.takes_last_ticket(smem.last)) {
                slots.template each_vector<THREADS>(
                    p.head_dim_vo, [&](const State<1, 4>& state, int row, int feat) {
                        finish(p, item, kv_head, row, feat, [&] { return state; });
                    });
            }
        }
    }
};

template <
    typename KV,
    int HEAD_DIM_QK,
    int HEAD_DIM_VO,
    int ROWS,
    int WARPS,
    int TOKENS,
    int STAGES,
    int MIN_CTAS,
    bool ALIGNED,
    bool PLAIN>
__global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)
    decode(const __grid_constant__ DecodeParams given) {
    const auto& p = params_of<PLAIN, KV, HEAD_DIM_QK, HEAD_DIM_VO>(given);
    using Cta = DecodeCta<KV, HEAD_DIM_QK, HEAD_DIM_VO, ROWS, WARPS, TOKENS, STAGES, ALIGNED>;
    using Ring = typename Cta::Ring;
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<typename Cta::Smem*>(smem_bytes);
    // There are registers for the queries of the next item on their way.
    constexpr bool Q_AHEAD = HEAD_DIM_QK <= 128 && (STAGES > 1 || PLAIN);
    const int warp_idx = threadIdx.x / WARP_SIZE;
    auto& ring = smem.ring[warp_idx];

    // 1 the CTA's part, and its first keys and queries on their way; keys into the L2 even before
    //   earlier launches have ended. Where inputs are ready, the launch before is waited for only
    //   as a warp comes to its last step, or before anything is written or its states are read.
    const int kv_head = blockIdx.x % p.work.num_kv_heads;
    const int part = blockIdx.x / p.work.num_kv_heads;
    if constexpr (Cta::LOOKS_EARLY) {
        prefetch_first_keys<Ring>(p, part, kv_head);
    }
    if (!p.inputs_ready) {
        griddepcontrol_wait();
    }
    Item item = load_item(p.work.first_items + part);
    const int32_t first_item = p.work.part_begin[part], end_item = p.work.part_end[part];
    if (first_item >= end_item) {
        griddepcontrol_wait();  // so that this launch ends after all before it
        return;
    }
    if (p.head_dim < HEAD_DIM_QK) {  // no garbage where the copies write nothing
        zero_buffers(ring);
    }
    typename Cta::Loader loader(
        p, ring, smem.keys[warp_idx], smem.rows[warp_idx], kv_head, item, first_item, end_item);
    typename Cta::Queries queries;
    queries.load(p, item, kv_head);
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) {
        loader.issue(stage);
    }
    queries.store(smem.q[first_item & 1], p.q_rows.kind);
    __syncthreads();  // queries are there

    const Logits<DecodeParams> logits(p);
    int stage = 0;
    int first_warp = 0;  // takes the first step of the item
    for (int32_t item_idx = first_item; item_idx < end_item; ++item_idx) {
        // 2 this item's queries, and the next one's on their way
        const int q_buffer = item_idx & 1;
        const typename Cta::Operands operands(smem.q[q_buffer]);
        const bool has_next = item_idx + 1 < end_item;
        if (has_next && Q_AHEAD) {
            queries.load(p, p.work.items[item_idx + 1], kv_head);
        }

        // 3 this warp's steps
        const Sight sight(p, item);
        typename Cta::Warp warp;
        const int32_t steps = num_steps<TOKENS>(item);
#pragma unroll 1
        for (int32_t step = (warp_idx - first_warp) & (WARPS - 1); step < steps; step += WARPS) {
            cp_async_wait_group<STAGES - 1>();
            __syncwarp();  // the other lanes' copies have landed too
            const uint32_t k_smem = smem_address(ring[stage]), v_smem = k_smem + Ring::V_OFFSET;
            typename Cta::Scores s;
            multiply_keys<KV, Ring::K_ROW_BYTES>(s, operands, k_smem);
            const typename Cta::Values values(v_smem);  // if they stay, on their way meanwhile
            // Not behind the branch of the cap, where they would take 8 registers more:
            const int32_t token = item.first_token + step * TOKENS;
            const typename Ring::KeyBits keys = smem.keys[warp_idx][stage];
            float scales[ROWS / 8][2];  // of fp8 read anew: registers are short
            logits.row_scales(scales, smem.q[q_buffer], swapped_row);
            logits.apply(s, scales);
            sight.mask(p, s, token, keys);
            const auto weights = warp.weigh(s);
            if constexpr (Cta::V_STAYS) {
                loader.issue(stage);
            }
            multiply_values<KV>(warp.o, weights, values);
            if constexpr (!Cta::V_STAYS) {
                loader.issue(stage);
            }
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }

        // 4 one state of all warps, and the result if no other CTA has more of the tile
        __syncthreads();  // the states of the item before have been read
        smem.states.store(warp, (warp_idx - first_warp) & (WARPS - 1));
        if (has_next) {
            if (!Q_AHEAD) {
                queries.load(p, p.work.items[item_idx + 1], kv_head);
            }
            queries.store(smem.q[q_buffer ^ 1], p.q_rows.kind);
        }
        __syncthreads();  // states and queries are there
        Cta::finish_item(p, smem, item, kv_head);
        first_warp = (first_warp + steps) & (WARPS - 1);
        if (has_next) {
            item = p.work.items[item_idx + 1];
        }
    }
}

}  // namespace cukv
