// prefill_sm80 -- attend from tiles of many packed query rows to paged keys, on any tensor cores.
//
//   s[r, j] = sm_scale * q[r] . k[j] (soft-capped), for the keys j of the item that row r sees
//   o[r] = sum_j softmax(s[r])[j] * v[j],  lse[r] = log2(sum_j 2^(s[r, j] * log2(e)))
//
// The query heads of a KV head, times the query rows of a request, are the rows of a tile. A CTA
// owns one KV head and one part of the work list; a warp owns WARP_ROWS of a tile's rows. All warps
// copy a step of TOKENS keys together while they compute with the one before.
// Bound by tensor cores: 2 * (head_dim + head_dim_vo) operations per row and key.
// Host: cukv/paged.py PagedKVCache.prefill, cukv/ragged.py RaggedTensor.prefill
// Reference: cukv/reference.py prefill
#include "common/attention.cuh"
#include "common/kv_ring.cuh"
#include "common/row_bits.cuh"
#include "common/slots.cuh"
#include "common/warp_state.cuh"

namespace cukv {

using PrefillSm80Params = AttentionParams;

static_assert(
    sizeof(PrefillSm80Params) == PARAMS_BYTES, "host and device disagree on the parameters");

// Geometry of one specialisation, and its shared memory.
template <
    typename KV,
    int HEAD_DIM_QK,
    int HEAD_DIM_VO,
    int WARP_ROWS,
    int WARPS,
    int TOKENS,
    int SCORES,
    bool ALIGNED>
struct PrefillCta {
    static constexpr int THREADS = WARPS * WARP_SIZE, ROWS = WARPS * WARP_ROWS, STAGES = 2;
    static constexpr int M_TILES = WARP_ROWS / 16;

    using Ring = KvRing<KV, HEAD_DIM_QK, HEAD_DIM_VO, TOKENS, STAGES, WARPS, WARPS>;
    using Loader = KvLoader<Ring, ALIGNED, PrefillSm80Params>;
    using Queries = QueryLoader<KV, HEAD_DIM_QK, ROWS, THREADS>;
    using Fragments = QueryFragments<KV, HEAD_DIM_QK, ROWS, WARP_ROWS>;
    using ScoreBits = typename UintOf<SCORES / 8>::type;
    using Scores = float[M_TILES][SCORES / 8][4];
    using Warp = WarpState<M_TILES, HEAD_DIM_VO / 8>;

    struct Smem {
        alignas(1024) typename Ring::Buffers ring;
        QueryTile<KV, HEAD_DIM_QK, ROWS> q;
        typename Ring::RowStarts rows[WARPS];
        typename Ring::Keys keys;
        // Here, because steps need all registers:
        Item item, next_item;
        Sight sights[WARPS];
        StepPlace places[WARPS];
        int32_t item_idx;
        int32_t kv_head;
        float late_scale;
        int32_t last;  // whether this CTA has the last ticket
    };

    // The part of an item that is this warp's: some of its rows.
    static __device__ __forceinline__ Item own_rows(Item item) {
        const int first = threadIdx.x / WARP_SIZE * WARP_ROWS;
        item.first_row += first;
        item.num_rows = min(max(item.num_rows - first, 0), WARP_ROWS);
        return item;
    }

    // Finishes this warp's rows of an item if it is all of its tile, or else leaves their state in
    // the item's slot.
    static __device__ __forceinline__ void finish_rows(
        const PrefillSm80Params& p, const Item& item, int kv_head, const Warp& warp) {
        const Item own = own_rows(item);
        const bool whole = item.first_slot < 0;
        const int warp_first = threadIdx.x / WARP_SIZE * WARP_ROWS;
        const Slots<ROWS, HEAD_DIM_VO> slots{p.work, item, kv_head};
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            const int m_tile = i / 2, half_idx = i % 2;
            const int row = lane_row(m_tile, half_idx);
            const float m = warp.m[m_tile][half_idx], d = warp.whole_d(m_tile, half_idx);
            const PackedRow at(p.group, own, kv_head, row);
            const RowResult<PrefillSm80Params> result(p, at, m, d);
            const bool owned = row < own.num_rows;
            if (owned && threadIdx.x % 4 == 0) {
                if (whole) {
                    result.store_lse();
                } else {
                    slots.store_state(m, d, warp_first + row);
                }
            }
            warp.template each_vector<KV>(m_tile, half_idx, [&](const float (&sums)[4], int feat) {
                if (owned && feat < p.head_dim_vo) {
                    if (whole) {
                        result.store(sums, feat);
                    } else {
                        slots.store_sums(sums, warp_first + row, feat);
                    }
                }
            });
        }
    }

    // Merges the slots of an item's tile, if it has any and this CTA has left the last of them.
    static __device__ __forceinline__ void finish_tile(
        const PrefillSm80Params& p, Smem& smem, const Item& item, int kv_head) {
        const Slots<ROWS, HEAD_DIM_VO> slots{p.work, item, kv_head};
        if (item.first_slot < 0 || item.num_rows == 0 || !slots.takes_last_ticket(smem.last)) {
            return;
        }
        slots.template each_vector<THREADS>(
            p.head_dim_vo, [&](const State<1, 4>& state, int row, int feat) {
                const PackedRow at(p.group, item, kv_head, row);
                const RowResult<PrefillSm80Params> result(p, at, state.m, state.d);
                result.store(state.o[0], feat);
                if (feat == 0) {
                    result.store_lse();
                }
            });
    }

    // Hides the scores of the keys from `token` on that rows do not see, under a mask of a class.
    static __device__ __forceinline__ void hide(
        const PrefillSm80Params& p,
        const Sight& sight,
        Scores& s,
        int32_t token,
        int32_t mask_class,
        ScoreBits keys) {
        const bool all_keys = keys == static_cast<ScoreBits>(~ScoreBits{0});
        if (mask_class != MIXED && all_keys && !sight.hides(token, token + SCORES)) {
            return;
        }
        RowBits<M_TILES, (SCORES + 31) / 32> bits;
        if (mask_class == MIXED) {
            bits.load_mask(p, sight, token);
        } else {
            bits.limit(p, sight, token);
        }
        bits.apply(s, keys);
    }
};

template <
    typename KV,
    int HEAD_DIM_QK,
    int HEAD_DIM_VO,
    int WARP_ROWS,
    int WARPS,
    int TOKENS,
    int SCORES,
    int MIN_CTAS,
    bool ALIGNED>
__global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)
    prefill_sm80(const __grid_constant__ PrefillSm80Params p) {
    constexpr int AT_ONCE = SHORT_OF_REGISTERS && SCORES > 32 ? 32 : SCORES;
    using Cta =
        PrefillCta<KV, HEAD_DIM_QK, HEAD_DIM_VO, WARP_ROWS, WARPS, TOKENS, AT_ONCE, ALIGNED>;
    using Ring = typename Cta::Ring;
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<typename Cta::Smem*>(smem_bytes);
    const int warp_first = threadIdx.x / WARP_SIZE * WARP_ROWS;  // row of a tile

    // 1 the CTA's part, and its first keys on their way; a launch behind this one may take what SMs
    //   this one leaves
    griddepcontrol_launch_dependents();
    const int part = blockIdx.x / p.work.num_kv_heads;
    const Item first = load_item(p.work.first_items + part);
    const int32_t first_item = p.work.part_begin[part], end_item = p.work.part_end[part];
    if (first_item >= end_item) {
        return;
    }
    const Logits<PrefillSm80Params> logits(p);
    // Then a multiplication of each score is saved: the exponential's addition does it.
    const bool scales_late = !is_fp8<KV> && logits.is_scale();
    if (threadIdx.x == 0) {
        smem.item = first;
        smem.item_idx = first_item;
        smem.kv_head = blockIdx.x % p.work.num_kv_heads;
        smem.late_scale = scales_late ? logits.scale : 1.0f;
    }
    if (p.head_dim < HEAD_DIM_QK) {  // no garbage where the copies write nothing
        for (int i = threadIdx.x * 16; i < Cta::STAGES * Ring::BYTES; i += Cta::THREADS * 16) {
            *reinterpret_cast<uint4*>(smem.ring[0] + i) = uint4{};
        }
    }
    __syncthreads();  // all that is there
    const Item& item = smem.item;
    const int& kv_head = smem.kv_head;
    typename Cta::Loader loader(
        p, smem.ring, smem.keys, smem.rows[threadIdx.x / WARP_SIZE], kv_head, first, first_item,
        end_item);
    loader.issue(0);
    StepPlace& place = smem.places[threadIdx.x / WARP_SIZE];
    loader.leave_at(place);

    int stage = 0;
    while (true) {
        __syncthreads();  // the item is there
        if (smem.item_idx >= place.end_item) {
            return;
        }
        typename Cta::Warp warp;
        {
            // 2 queries
            typename Cta::Queries queries;
            queries.load(p, item, kv_head);
            queries.store(smem.q, p.q_rows.kind);
            if (threadIdx.x == 0 && smem.item_idx + 1 < place.end_item) {
                smem.next_item = load_item(p.work.items + smem.item_idx + 1);
            }
            __syncthreads();  // queries are there
            const typename Cta::Fragments fragments{smem.q, warp_first};
            if (threadIdx.x % WARP_SIZE == 0) {
                smem.sights[threadIdx.x / WARP_SIZE] = Sight(p, Cta::own_rows(item));
            }
            __syncwarp();  // the sight is there
            const Sight& sight = smem.sights[threadIdx.x / WARP_SIZE];

            // 3 steps: the next one's keys come while this one is computed
#pragma unroll 1
            for (int32_t step_token = item.first_token; step_token < item.end_token;
                 step_token += TOKENS) {
                cp_async_wait_group<0>();
                __syncthreads();  // all copies have landed, and the other buffer has been read
                loader.issue(stage ^ 1, place);
                // AT_ONCE tokens at a time: there are no registers for the scores of more.
#pragma unroll 1
                for (int first = 0; first < TOKENS; first += AT_ONCE) {
                    const int32_t token = step_token + first;
                    if (token >= sight.end_token) {
                        break;
                    }
                    const int32_t mask_class = sight.mask_class(p, token);
                    if (mask_class == EMPTY) {
                        continue;
                    }
                    const uint32_t k_smem = smem_address(smem.ring[stage]);
                    const uint32_t v_smem = k_smem + Ring::V_OFFSET;
                    typename Cta::Scores s = {};
                    multiply_keys<KV, Ring::K_ROW_BYTES>(
                        s, fragments, k_smem + first * Ring::K_ROW_BYTES);
                    if (!scales_late) {
                        float scales[Cta::M_TILES][2];
                        logits.row_scales(scales, smem.q, [&](int m_tile, int half_idx) {
                            return warp_first + lane_row(m_tile, half_idx);
                        });
                        logits.apply(s, scales);
                    }
                    Cta::hide(
                        p, sight, s, token, mask_class,
                        static_cast<typename Cta::ScoreBits>(smem.keys[stage] >> first));
                    warp.weigh(s, smem.late_scale);
                    multiply_values<KV, Ring::V_ROW_BYTES>(
                        warp.o, s, v_smem + first * Ring::V_ROW_BYTES);
                }
                stage ^= 1;
            }
        }

        // 4 the result, or a slot's state if the tile has other items
        Cta::finish_rows(p, item, kv_head, warp);

        // 5 the result of all items of the tile, if this is the last
        Cta::finish_tile(p, smem, item, kv_head);
        __syncthreads();  // the item and its queries have been read
        if (threadIdx.x == 0) {
            smem.item = smem.next_item;
            ++smem.item_idx;
        }
    }
}

}  // namespace cukv
