// A team: a warpgroup that computes 64 rows of one item after the other.
//
// Its queries and keys come by others (common/row_server.cuh, common/kv_server.cuh). It never
// pauses between items: the first scores of an item are computed together with the last sums of the
// one before, whose results go out through the memory of its queries. Cta: Queries, Results, Keys
// and Values, its tiles; TOKENS of a step, SLOTS, PAGED, MASKED; State, Order, Smem. Params: those
// of common/attention.cuh, and piece_bits.
#pragma once
#include "common/kv_server.cuh"
#include "common/logits.cuh"
#include "common/team_results.cuh"
#include "common/team_sight.cuh"
#include "common/warpgroup_state.cuh"

namespace cukv {

template <typename KV, typename Cta, bool SOFT_CAP, typename Params>
struct Team {
    static constexpr int TOKENS = Cta::TOKENS;
    using Queries = typename Cta::Queries;
    using Keys = typename Cta::Keys;
    using Values = typename Cta::Values;
    using Results = TeamResults<KV, Cta, Params>;
    using Ended = typename Results::Ended;

    const Params& p;
    typename Cta::Smem& smem;
    const int team, warp_idx, lane_idx;
    const int row;      // of the tile, the first of this lane's two; the other is 8 below
    float scale;        // of scores, to base 2
    float score_scale;  // of scores before they are capped
    typename Cta::State state;
    Results results;

    // The item.
    int slot = 0;
    uint32_t num_items = 0;
    int32_t token = 0;  // of the step
    int32_t first_token;
    TeamSight<Cta, Cta::MASKED> sight;
    bool starts = true;   // the sums that come next are the item's first
    bool halved = false;  // they are of the first half of a step: no row sees the second
    bool ends = false;    // they are its last, and no scores are left
    bool plain = false;   // all rows see all keys of the scores that come next

    RingPlace<Cta::K_STAGES> k;
    RingPlace<Cta::V_STAGES> v;
    bool k_here = false, v_here = false;
    uint32_t dropped = 0;  // pieces of the step

    __device__ __forceinline__ Team(const Params& p, typename Cta::Smem& smem, int warp_idx)
        : p(p),
          smem(smem),
          team(warp_idx / 4 - 1),
          warp_idx(warp_idx),
          lane_idx(threadIdx.x % WARP_SIZE),
          row(team * Cta::TEAM_ROWS + warp_idx % 4 * 16 + lane_idx / 4),
          results{p, smem, team, warp_idx, row, 0.0f, p.v_scale.get()} {
        // So small a scale stands for 0: it makes no finite score count, but hidden ones stay
        // hidden.
        const float natural = fabsf(p.sm_scale * p.q_scale.get() * p.k_scale.get());
        score_scale = SOFT_CAP ? __fdividef(natural, p.logits_soft_cap) : natural * LOG2_E;
        score_scale = fmaxf(score_scale, 1e-30f);
        scale = SOFT_CAP ? p.logits_soft_cap * LOG2_E : score_scale;
        results.scale = scale;
    }

    // Waits for the next item and its queries; false if there is none.
    __device__ __forceinline__ bool has_next_item() {
        const int next_slot = num_items % Cta::SLOTS;
        mbarrier_try_wait(smem.q_full[next_slot][team], num_items / Cta::SLOTS & 1);
        return smem.orders[next_slot][team].item.num_rows > 0;
    }

    __device__ __forceinline__ void begin_item() {
        slot = num_items++ % Cta::SLOTS;
        const Item item = smem.orders[slot][team].item;
        token = last_step<TOKENS>(item) + TOKENS;
        first_token = first_step<TOKENS>(item);
        sight.begin(p, item, team, row);
        state.rows = RowStates{};
    }

    __device__ __forceinline__ void multiply_keys() {
        const uint64_t a = Queries::descriptor(smem_address(smem.q[slot][team]));
        const uint64_t b = Keys::descriptor(smem_address(smem.k[k.stage]));
#pragma unroll
        for (int i = 0; i < Queries::BYTES / Cta::TEAM_ROWS / 32; ++i) {
            wgmma_ss<KV>(state.s, a + Queries::columns(i), b + Keys::columns(i), i > 0);
        }
        wgmma_commit_group();
    }

    // By the first KEYS weights.
    template <int KEYS>
    __device__ __forceinline__ void multiply_values() {
        const uint64_t b = Values::descriptor(smem_address(smem.v[v.stage]));
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) {
            wgmma_rs_trans<KV>(state.o, state.weights[i], b + Values::rows(i), i > 0 || !starts);
        }
        wgmma_commit_group();
    }

    // The first KEYS scores.
    template <bool MASKED, int KEYS>
    __device__ __forceinline__ void weigh(const SeenKeys<TOKENS>& seen) {
        if constexpr (SOFT_CAP) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) {
                float& x = state.s[i / 4][i % 4];
                x = tanh_of(x * score_scale);
            }
        }
        if constexpr (MASKED) {
            seen.template hide<KEYS>(state.s);
        }
        state.template weigh<KEYS>(scale);
    }

    // The keys of the step that this lane's rows see.
    __device__ __forceinline__ SeenKeys<TOKENS> seen_keys() const {
        SeenKeys<TOKENS> seen = sight.seen(token);
        if constexpr (Cta::PAGED) {
            seen.drop(dropped, p.piece_bits);
        }
        return seen;
    }

    // The warp's scores once more, from the same queries and keys.
    __device__ __forceinline__ void rescore(float (&s)[TOKENS / 8][4]) const {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) {
            s[i / 4][i % 4] = 0.0f;
        }
        const uint32_t q_tile = smem_address(smem.q[slot][team]);
        const uint32_t k_tile = smem_address(smem.k[k.stage]);
        const int q_row = warp_idx % 4 * 16 + lane_idx % 16;
        const int k_row = (lane_idx & 7) + lane_idx / 16 * 8;
#pragma unroll 1
        for (int i = 0; i < Queries::BYTES / Cta::TEAM_ROWS / 32; ++i) {
            uint32_t a[4], b[4];
            ldmatrix_x4(a, q_tile + Queries::offset(q_row, 2 * i + lane_idx / 16));
#pragma unroll
            for (int j = 0; j < TOKENS / 16; ++j) {
                ldmatrix_x4(b, k_tile + Keys::offset(16 * j + k_row, 2 * i + (lane_idx >> 3 & 1)));
                mma_m16n8k16<KV>(s[2 * j], a, b[0], b[1]);
                mma_m16n8k16<KV>(s[2 * j + 1], a, b[2], b[3]);
            }
        }
    }

    // Scores of a step, and sums of the step before. Of the former's keys the first SEEN may be
    // seen, and the first SUMMED of the latter's.
    template <bool MASKED, int SEEN, int SUMMED>
    __device__ __forceinline__ void step() {
        constexpr bool LAGS = !MASKED && !SOFT_CAP;
        static_assert(SEEN == TOKENS || MASKED, "other keys are hidden");
        if constexpr (MASKED) {
            sight.load(p);
        }
        hold(state.s);
        hold(state.o);
        wgmma_fence();
        multiply_keys();
        if (!v_here) {
            mbarrier_try_wait(smem.v_full[v.stage], v.parity);
        }
        wgmma_fence();
        multiply_values<SUMMED>();
        SeenKeys<TOKENS> seen;
        if constexpr (MASKED) {
            seen = seen_keys();
        }
        look_ahead();
        wgmma_wait_group<1>();
        hold(state.s);
        if constexpr (LAGS) {
            state.weigh_by_old_maximum(scale);
        } else {
            release_keys();
            weigh<MASKED, SEEN>(seen);
        }
        // The compiler moves the wait up to the maximum, unless what comes before it needs the
        // weights and touches memory.
        st_shared_if(
            lane_idx == 0, smem.unread[warp_idx - 4], state.step_sum[0] + state.step_sum[1]);
        wgmma_wait_group<0>();
        hold(state.o);
        if (lane_idx == 0) {
            mbarrier_arrive(smem.v_empty[v.stage]);
        }
        if constexpr (LAGS) {
            state.catch_up(scale, [&](float (&s)[TOKENS / 8][4]) { rescore(s); });
            release_keys();
        }
        k.next();
        v.next();
        // Asked early, needed by the next step.
        k_here = mbarrier_test_wait(smem.k_full[k.stage], k.parity);
        v_here = mbarrier_test_wait(smem.v_full[v.stage], v.parity);
        if (k_here) {
            look_up();
        }
        state.template pack<SEEN>();
    }

    // What comes with the keys of a step.
    __device__ __forceinline__ void look_up() {
        dropped = Cta::PAGED ? smem.k_dropped[k.stage] : 0;
        sight.look_up(smem, k.stage);
    }

    // Behind what all lanes have looked up with the keys.
    __device__ __forceinline__ void release_keys() {
        __syncwarp();
        if (lane_idx == 0) {
            mbarrier_arrive(smem.k_empty[k.stage]);
        }
    }

    // What comes after the present step, asked while its products go on.
    __device__ __forceinline__ void look_ahead() {
        ends = token <= first_token;
        plain = sight.sees_all(token - TOKENS);
    }

    // Before a step: whether its keys are here, and whether some row does not see all of them.
    __device__ __forceinline__ bool masked() {
        if (!k_here) {
            mbarrier_try_wait(smem.k_full[k.stage], k.parity);
            look_up();
        }
        return dropped != 0 || !(Cta::MASKED ? sight.sees_all(token) : plain);
    }

    // The first scores of an item, which no sums go with.
    __device__ __forceinline__ void begin() {
        token -= TOKENS;
        masked();
        sight.load(p);
        hold(state.s);
        wgmma_fence();
        multiply_keys();
        wgmma_wait_group<0>();
        hold(state.s);
        release_keys();
        k.next();
        starts = true;
        look_ahead();
        weigh<true, TOKENS>(seen_keys());
        state.template pack<TOKENS>();
    }

    // The last sums of an item, which no scores go with.
    __device__ __forceinline__ void end() {
        mbarrier_try_wait(smem.v_full[v.stage], v.parity);
        hold(state.o);
        wgmma_fence();
        multiply_values<TOKENS>();
        wgmma_wait_group<0>();
        hold(state.o);
        if (lane_idx == 0) {
            mbarrier_arrive(smem.v_empty[v.stage]);
        }
        v.next();
        k_here = v_here = false;
        Ended rows = results.conclude(slot, state.rows);
        results.finish(slot, rows, state.o);
    }

    __device__ __forceinline__ void attend() {
        while (has_next_item()) {
            begin_item();
            begin();
            while (true) {
                const bool ends = this->ends;
                const int old_slot = slot;
                Ended old;
                if (ends) {
                    // With one slot, the next item's queries come where this one's results are
                    // first.
                    if (Cta::SLOTS == 1 || !has_next_item()) {
                        break;
                    }
                    old = results.conclude(slot, state.rows);
                    begin_item();
                }
                token -= TOKENS;
                const bool hides = masked() || ends;
                const bool old_halved = halved;
                halved = ends && sight.is_half(token);
                if (halved) {
                    step<true, TOKENS / 2, TOKENS>();
                } else if (hides) {
                    step<true, TOKENS, TOKENS>();
                } else if (old_halved) {
                    step<false, TOKENS, TOKENS / 2>();
                } else {
                    step<false, TOKENS, TOKENS>();
                }
                if (ends) {
                    results.finish(old_slot, old, state.o);
                    forget(state.o);
                } else {
                    state.rescale();
                }
                starts = ends;
            }
            end();
        }
    }
};

}  // namespace cukv
