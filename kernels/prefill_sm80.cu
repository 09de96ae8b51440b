// prefill_sm80 -- attend from tiles of many packed query rows to paged keys, on any tensor cores.
//
//   s[r, j] = sm_scale * q[r] . k[j] (soft-capped), for the keys j of the item that row r sees
//   o[r] = sum_j softmax(s[r])[j] * v[j],  lse[r] = log2(sum_j 2^(s[r, j] * log2(e)))
//
// The query heads of a KV head, times the query rows of a request, are the rows of a tile. A CTA
// owns one KV head and one part of the work list; a warp owns WARP_ROWS of a tile's rows, and
// brings their queries and leaves their results without the others. All warps copy a step of TOKENS
// keys together while they compute with the one before.
//
// PLAIN: a call that has no options, though it may be causal, and whose keys lie in runs: packed,
// or PAGED so that the rows of a step that a warp copies are of one page. They are found all at
// once (common/run_ring.cuh), which leaves a fifth less to do beside a step's products.
//
// MASKED: a plain call but for a custom mask, of packed keys. A step comes with its entry of the
// mask (common/mask.cuh), whose bits are read where rows see a part of it.
//
// Bound by tensor cores: 2 * (head_dim + head_dim_vo) operations per row and key.
// Host: cukv/paged.py PagedKVCache.prefill, cukv/ragged.py RaggedTensor.prefill
// Reference: cukv/reference.py prefill
#include "common/attention.cuh"
#include "common/row_bits.cuh"
#include "common/run_ring.cuh"
#include "common/warp_queries.cuh"
#include "common/warp_results.cuh"

namespace cukv {

using PrefillSm80Params = AttentionParams;

static_assert(
    sizeof(PrefillSm80Params) == PARAMS_BYTES, "host and device disagree on the parameters");

// The parameters of a plain call, which may be causal but has no levels here, or as given. A mask
// replaces causal.
template <bool PLAIN, bool MASKED, typename KV, int HEAD_DIM_QK, int HEAD_DIM_VO>
__device__ __forceinline__ decltype(auto) params_of(const PrefillSm80Params& given) {
    if constexpr (PLAIN) {
        PrefillSm80Params p = plain_params<KV, HEAD_DIM_QK, HEAD_DIM_VO>(given);
        if constexpr (MASKED) {
            p.work.mask = given.work.mask;
            p.causal = 0;
        }
        p.first_seen = p.levels.q_rows = p.levels.o_rows = nullptr;
        p.levels.num_rows = int64_t{1} << 62;  // no row is behind those of levels
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
    int WARP_ROWS,
    int WARPS,
    int TOKENS,
    bool ALIGNED,
    bool PLAIN,
    bool PAGED,
    bool MASKED>
struct PrefillCta {
    static constexpr int THREADS = WARPS * WARP_SIZE, ROWS = WARPS * WARP_ROWS;
    static constexpr int M_TILES = WARP_ROWS / 16;
    static_assert(ALIGNED || !PLAIN, "rows of a plain call are moved in whole vectors");
    static_assert(PLAIN || !MASKED, "other calls are told at run time whether they have a mask");

    using Ring = typename Select<
        PLAIN,
        RunRing<KV, HEAD_DIM_QK, HEAD_DIM_VO, TOKENS, WARPS, PAGED, MASKED>,
        SharedRing<KV, HEAD_DIM_QK, HEAD_DIM_VO, TOKENS, WARPS>>::type;
    using Loader = typename Select<
        PLAIN,
        RunLoader<Ring, PrefillSm80Params>,
        SharedLoader<Ring, ALIGNED, PrefillSm80Params>>::type;
    using Queries = WarpQueries<KV, HEAD_DIM_QK, ROWS, WARP_ROWS>;
    using Fragments = QueryFragments<KV, HEAD_DIM_QK, ROWS, WARP_ROWS>;
    template <int NUM>
    using Scores = float[M_TILES][NUM / 8][4];  // of NUM keys
    using Results = WarpResults<KV, HEAD_DIM_VO, WARP_ROWS, WARPS, PrefillSm80Params>;
    using Warp = typename Results::Warp;

    struct Smem {
        typename Ring::Buffers ring;
        QueryTile<KV, HEAD_DIM_QK, ROWS> q;
        // What is a warp's alone. Here, because steps need all registers.
        struct Own {
            Item items[2];  // this one and the next, in turn
            int32_t item_idx, end_item;
            Sight sight;
            typename Ring::Own ring;

            __device__ __forceinline__ const Item& item() const { return items[item_idx % 2]; }
            __device__ __forceinline__ Item& next() { return items[(item_idx + 1) % 2]; }
            __device__ __forceinline__ bool is_last() const { return item_idx + 1 >= end_item; }
        } warps[WARPS];
        int32_t kv_head;
        float scale;       // of common/logits.cuh
        float late_scale;  // that weights are made with; 0: scores must become logits first
        int32_t last;      // whether this CTA has the last ticket

        // Those of keys and values in buffer 0.
        __device__ __forceinline__ OperandAddresses operands(int warp_first) const {
            if constexpr (PLAIN) {
                return ring.lanes[tid_x()].operands;
            } else {
                return operands_of(*this, warp_first);
            }
        }
    };

    static __device__ __forceinline__ OperandAddresses
    operands_of(const Smem& smem, int warp_first) {
        const uint32_t keys = smem_address(smem.ring.bytes[0]), values = keys + Ring::V_OFFSET;
        return {
            KeyOperands<KV>::template address<Ring::K_ROW_BYTES>(keys),
            ValueOperands<KV>::template address<Ring::V_ROW_BYTES>(values),
            Fragments::address_of(smem.q, warp_first)};
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
    bool ALIGNED,
    bool PLAIN,
    bool PAGED,
    bool MASKED>
__global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)
    prefill_sm80(const __grid_constant__ PrefillSm80Params given) {
    const auto& p = params_of<PLAIN, MASKED, KV, HEAD_DIM_QK, HEAD_DIM_VO>(given);
    constexpr int AT_ONCE = SHORT_OF_REGISTERS && SCORES > 32 ? 32 : SCORES;
    // Whether what loads other steps goes between the products of one: with two CTAs an SM there
    // are few warps to compute meanwhile.
    constexpr bool WEAVES = ALIGNED && AT_ONCE == TOKENS && WARPS == 4;
    // Of packed keys an item's last step, and others that rows see a part of, go by halves: those
    // that no row of a warp sees are left out, and there are registers to load queries meanwhile.
    // Pages have one way for all steps: two took 2 % longer on an H200, with 512 rows on 8192 keys.
    // So have masks, which may show a part of every step.
    constexpr bool HALVES = PLAIN && !PAGED && !MASKED && WEAVES;
    constexpr int PART = HALVES ? TOKENS / 2 : AT_ONCE;  // of a step that is not woven
    using Cta = PrefillCta<
        KV, HEAD_DIM_QK, HEAD_DIM_VO, WARP_ROWS, WARPS, TOKENS, ALIGNED, PLAIN, PAGED, MASKED>;
    using Ring = typename Cta::Ring;
    static_assert(
        !WEAVES || TOKENS / 16 * Cta::Fragments::K_STEPS >= 4 * Ring::GROUPS,
        "every group of copies has an ldmatrix of keys to go behind");
    static_assert(
        !WEAVES || TOKENS / 16 * (HEAD_DIM_VO / 16) >= 8,
        "rows are found, and ids looked up, behind an ldmatrix of values each");
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<typename Cta::Smem*>(smem_bytes);
    auto& own = smem.warps[tid_x() / WARP_SIZE];
    const int warp_first = tid_x() / WARP_SIZE * WARP_ROWS;  // row of a tile

    // 1 the CTA's part, and its first keys and queries on their way; a launch behind this one may
    //   take what SMs this one leaves
    griddepcontrol_launch_dependents();
    const int part = blockIdx.x / p.work.num_kv_heads;
    const Item first = load_item(p.work.first_items + part);
    const int32_t first_item = p.work.part_begin[part], end_item = p.work.part_end[part];
    if (first_item >= end_item) {
        return;
    }
    if (tid_x() == 0) {
        const Logits<PrefillSm80Params> logits(p);
        smem.kv_head = blockIdx.x % p.work.num_kv_heads;
        smem.scale = logits.scale;
        // Then a multiplication of each score is saved: the exponential's addition does it.
        smem.late_scale = !is_fp8<KV> && logits.is_scale() ? logits.scale : 0.0f;
    }
    if constexpr (PLAIN) {
        const int kv_head = blockIdx.x % p.work.num_kv_heads;  // as smem will have it
        Cta::Loader::begin(p, smem.ring, kv_head, Cta::operands_of(smem, warp_first));
    } else if (tid_x() == 0) {
        Cta::Loader::begin(p, smem.ring, smem.kv_head);
    }
    if (tid_x() % WARP_SIZE == 0) {
        own.items[first_item % 2] = first;
        own.item_idx = first_item;
        own.end_item = end_item;
    }
    if (!ALIGNED && p.head_dim < HEAD_DIM_QK) {  // no garbage where the copies write nothing
        char* bytes = smem.ring.bytes[0];
        for (int i = tid_x() * 16; i < Ring::STAGES * Ring::BYTES; i += Cta::THREADS * 16) {
            *reinterpret_cast<uint4*>(bytes + i) = uint4{};
        }
    }
    __syncthreads();  // all that is there
    const typename Cta::Loader loader(p, smem.ring, own.ring, first, first_item, end_item);
    loader.start();
    Cta::Queries::load(p, smem.q, warp_first, Cta::Results::own_rows(first), smem.kv_head);

    uint32_t step = 0;  // of the part
    while (true) {
        if (tid_x() % WARP_SIZE == 0) {
            own.sight = Sight(p, Cta::Results::own_rows(own.item()));
            if constexpr (PLAIN && !PAGED) {  // are_keys() does not say where packed keys end
                Sight& sight = own.sight;
                sight.end_token = min(sight.end_token, own.item().end_token);
                // No step that is seen whole is an item's last, but under a mask.
                const int32_t last = sight.end_token - (MASKED ? 0 : 1);
                sight.all_to = smem.late_scale == 0.0f ? 0 : min(sight.all_to, last);
            }
        }
        if (!own.is_last()) {
            copy_item(own.next(), p.work.items + own.item_idx + 1);
        }
        __syncwarp();  // the sight is there

        // 2 steps: the next one's keys come while this one is computed
        typename Cta::Warp warp(Cta::Warp::LOWEST);
        const auto load_next_queries = [&] {
            if (!own.is_last()) {
                Cta::Queries::load(
                    p, smem.q, warp_first, Cta::Results::own_rows(own.next()), smem.kv_head);
            }
        };
        int32_t mask_entry = 0;  // of the step, if MASKED
        // Scores, which are zero, and sums of as many keys, from `first` of the step on.
        const auto attend = [&](auto& s, int32_t step_token, int first, int32_t mask_class) {
            constexpr int NUM = sizeof(s[0]) / sizeof(s[0][0]) * 8;
            constexpr bool IS_WOVEN = WEAVES && NUM == TOKENS, IS_HALF = HALVES && !IS_WOVEN;
            constexpr bool IS_SEEN = HALVES && IS_WOVEN;  // whole, by every row
            const int32_t token = step_token + first;
            const Sight& sight = own.sight;
            float late_scale = smem.late_scale;
            const int32_t end = token + NUM;
            // Without a window, rows see all before all_to.
            bool sees_all = smem.ring.are_keys(step) && mask_class == FULL &&
                            !(PLAIN ? !IS_SEEN && end > sight.all_to : sight.hides(token, end));
            if (!HALVES) {
                sees_all = __all_sync(0xffffffffu, sees_all);
            }
            const bool is_plain = sees_all && (IS_SEEN || late_scale != 0.0f);
            const OperandAddresses operands = smem.operands(warp_first);
            const uint32_t buffer = step % Ring::STAGES * Ring::BYTES;
            const typename Cta::Fragments fragments{smem.q, warp_first, operands.queries};
            const typename Cta::Loader::Copies copies(loader, step + 1);
            multiply_keys<KV, Ring::K_ROW_BYTES>(
                s, fragments, operands.keys + buffer + first * Ring::K_ROW_BYTES, [&](int n) {
                    if (IS_WOVEN) {
                        copies.meanwhile(n);
                    }
                });
            float largest[Cta::M_TILES][2];
            warp.find_largest(largest, s);  // most steps are plain: among the last products
            if (!is_plain) {
                if (late_scale == 0.0f) {
                    const Logits<PrefillSm80Params> logits(p, smem.scale);
                    float scales[Cta::M_TILES][2];
                    logits.row_scales(scales, smem.q, [&](int m_tile, int half_idx) {
                        return warp_first + lane_row(m_tile, half_idx);
                    });
                    logits.apply(s, scales);
                    late_scale = 1.0f;
                }
                if (!sees_all) {
                    if constexpr (MASKED) {
                        hide_listed(p, sight, s, mask_entry, token);
                    } else {
                        const int32_t num_tokens = own.item().end_token - step_token;
                        hide(p, sight, s, token, smem.ring.key_bits(step, num_tokens) >> first);
                    }
                }
                warp.find_largest(largest, s);
            }
            if (IS_HALF && end >= sight.end_token) {
                load_next_queries();  // this item's have served
            }
            warp.weigh(s, largest, late_scale);
            typename Cta::Loader::LookUps look_ups(loader, step);
            multiply_values<KV, Ring::V_ROW_BYTES>(
                warp.o, s, smem.operands(warp_first).values + buffer + first * Ring::V_ROW_BYTES,
                [&](int n, int num) {
                    if (IS_WOVEN) {
                        look_ups.meanwhile(n, num);
                    }
                });
            look_ups.finish();
        };
        const auto class_from = [&](int32_t token) {
            return MASKED ? class_of(mask_entry, token) : own.sight.mask_class(p, token);
        };
#pragma unroll 1
        for (int32_t token = own.item().first_token, end_token = own.item().end_token;
             token < end_token; token += TOKENS, ++step) {
            cp_async_commit_group();
            const int32_t end_seen = own.sight.end_token, all_to = own.sight.all_to;
            if constexpr (MASKED) {
                mask_entry = own.ring.entry(step);
            }
            cp_async_wait_group<0>();
            __syncthreads();  // all copies have landed, and the other buffer has been read
            if constexpr (WEAVES) {
                const int32_t mask_class = class_from(token);
                if (HALVES ? token + TOKENS <= all_to : token < end_seen && mask_class != EMPTY) {
                    typename Cta::template Scores<TOKENS> s = {};
                    attend(s, token, 0, mask_class);
                    continue;
                }
            }
            loader.load(step);
            if constexpr (HALVES || !WEAVES) {
#pragma unroll 1
                for (int first = 0; first < TOKENS && token + first < end_seen; first += PART) {
                    const int32_t mask_class = class_from(token + first);
                    if (mask_class != EMPTY) {
                        typename Cta::template Scores<PART> s = {};
                        attend(s, token, first, mask_class);
                    }
                }
            }
        }
        const Item& item = own.item();
        if (item.first_token >= item.end_token) {  // what a step would have waited for
            cp_async_commit_group();
            cp_async_wait_group<0>();
            __syncwarp();
        }

        // 3 the next item's queries on their way, this one's result
        if (!HALVES || item.first_token >= own.sight.end_token) {
            load_next_queries();
        }
        Cta::Results::finish(p, item, smem.kv_head, warp, smem.last);
        if (own.is_last()) {
            cp_async_commit_group();   // what was asked for beyond the last step
            cp_async_wait_group<0>();  // nothing lands after the end
            return;
        }
        __syncwarp();  // every lane has finished the item
        if (tid_x() % WARP_SIZE == 0) {
            ++own.item_idx;
        }
        __syncwarp();  // all know the next one
    }
}

}  // namespace cukv
