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
#include "common/logits.cuh"
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
    static constexpr int M_TILES = WARP_ROWS / 16, HALVES = 2;

    using Ring = KvRing<KV, HEAD_DIM_QK, HEAD_DIM_VO, TOKENS, STAGES, WARPS, WARPS>;
    using Loader = KvLoader<Ring, ALIGNED, PrefillSm80Params>;
    using Queries = QueryLoader<KV, HEAD_DIM_QK, ROWS, THREADS>;
    using Fragments = QueryFragments<KV, HEAD_DIM_QK, ROWS, WARP_ROWS, false>;
    using ScoreBits = typename UintOf<SCORES / 8>::type;
    using Scores = float[M_TILES][SCORES / 8][2 * HALVES];
    using Warp = WarpState<M_TILES, HALVES, HEAD_DIM_VO / 8>;

    struct Smem {
        alignas(1024) typename Ring::Buffers ring;
        QueryTile<KV, HEAD_DIM_QK, ROWS> q;
        typename Ring::Keys keys;
        // Here, because steps need all registers:
        Item item;
        Sight sights[WARPS];
        int32_t item_idx;
        int32_t last;  // whether this CTA has the last ticket
    };

    // The part of an item that is this warp's: some of its rows.
    static __device__ __forceinline__ Item own_rows(Item item) {
        const int first = threadIdx.x / WARP_SIZE * WARP_ROWS;
        item.first_row += first;
        item.num_rows = min(max(item.num_rows - first, 0), WARP_ROWS);
        return item;
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
    using Cta = PrefillCta<KV, HEAD_DIM_QK, HEAD_DIM_VO, WARP_ROWS, WARPS, TOKENS, SCORES, ALIGNED>;
    using Ring = typename Cta::Ring;
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<typename Cta::Smem*>(smem_bytes);
    const int warp_first = threadIdx.x / WARP_SIZE * WARP_ROWS;  // row of a tile

    // 1 the CTA's part, and its first keys on their way
    const int kv_head = blockIdx.x % p.work.num_kv_heads;
    const int part = blockIdx.x / p.work.num_kv_heads;
    const Item first = load_item(p.work.first_items + part);
    const int32_t first_item = p.work.part_begin[part], end_item = p.work.part_end[part];
    if (first_item >= end_item) {
        return;
    }
    if (p.head_dim < HEAD_DIM_QK) {  // no garbage where the copies write nothing
        for (int i = threadIdx.x * 16; i < Cta::STAGES * Ring::BYTES; i += Cta::THREADS * 16) {
            *reinterpret_cast<uint4*>(smem.ring[0] + i) = uint4{};
        }
        __syncthreads();
    }
    typename Cta::Loader loader(p, smem.ring, smem.keys, kv_head, first, first_item, end_item);
    loader.issue(0);

    const Logits<PrefillSm80Params> logits(p);
    int stage = 0;
    const Item& item = smem.item;
    if (threadIdx.x == 0) {
        smem.item = first;
        smem.item_idx = first_item;
    }
    while (true) {
        __syncthreads();  // the item is there
        if (smem.item_idx >= end_item) {
            return;
        }
        typename Cta::Warp warp;
        {
            // 2 queries
            typename Cta::Queries queries;
            queries.load(p, item, kv_head);
            queries.store(smem.q, p.q_rows.kind);
            __syncthreads();  // queries are there
            const typename Cta::Fragments fragments(smem.q, warp_first);
            if (threadIdx.x % WARP_SIZE == 0) {
                smem.sights[threadIdx.x / WARP_SIZE] = Sight(p, Cta::own_rows(item));
            }
            __syncwarp();  // the sight is there
            const Sight& sight = smem.sights[threadIdx.x / WARP_SIZE];
            float scales[Cta::M_TILES][Cta::HALVES];
            logits.row_scales(scales, smem.q, warp_first);

            // 3 steps: the next one's keys come while this one is computed
#pragma unroll 1
            for (int32_t step_token = item.first_token; step_token < item.end_token;
                 step_token += TOKENS) {
                cp_async_wait_group<0>();
                __syncthreads();  // all copies have landed, and the other buffer has been read
                loader.issue(stage ^ 1);
                // SCORES tokens at a time: there are no registers for the scores of more.
#pragma unroll 1
                for (int first = 0; first < TOKENS; first += SCORES) {
                    const int32_t token = step_token + first;
                    if (token >= sight.end_token) {
                        break;
                    }
                    const uint32_t k_smem = smem_address(smem.ring[stage]);
                    const uint32_t v_smem = k_smem + Ring::V_OFFSET;
                    typename Cta::Scores s = {};
                    multiply_keys<KV, Ring::K_ROW_BYTES>(
                        s, fragments, k_smem + first * Ring::K_ROW_BYTES);
                    logits.apply(s, scales);
                    sight.mask(
                        p, s, token,
                        static_cast<typename Cta::ScoreBits>(smem.keys[stage] >> first));
                    warp.weigh(s);
                    multiply_values<KV, Ring::V_ROW_BYTES>(
                        warp.o, s, v_smem + first * Ring::V_ROW_BYTES);
                }
                stage ^= 1;
            }
        }

        // 4 the result, or a slot's state if the tile has other items
        const Item own = Cta::own_rows(item);
        const bool whole = item.first_slot < 0;
        const Slots<Cta::ROWS, HEAD_DIM_VO> slots{p.work, item, kv_head};
#pragma unroll
        for (int i = 0; i < Cta::M_TILES * Cta::HALVES; ++i) {
            const int m_tile = i / Cta::HALVES, half_idx = i % Cta::HALVES;
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

        // 5 the result of all items of the tile, if this is the last
        if (!whole && item.num_rows > 0 && slots.takes_last_ticket(smem.last)) {
            slots.template each_vector<Cta::THREADS>(
                p.head_dim_vo, [&](const State<1, 4>& state, int row, int feat) {
                    const PackedRow at(p.group, item, kv_head, row);
                    const RowResult<PrefillSm80Params> result(p, at, state.m, state.d);
                    result.store(state.o[0], feat);
                    if (feat == 0) {
                        result.store_lse();
                    }
                });
        }
        __syncthreads();  // the item and its queries have been read
        if (threadIdx.x == 0 && ++smem.item_idx < end_item) {
            smem.item = load_item(p.work.items + smem.item_idx);
        }
    }
}

}  // namespace cukv
