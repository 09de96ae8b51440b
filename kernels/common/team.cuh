// A team: a warpgroup that computes 64 rows of one item after the other.
//
// Its queries and keys come by others (common/row_server.cuh, common/kv_server.cuh). It never
// pauses between items: the first scores of an item are computed together with the last sums of the
// one before, whose results go out through the memory of its queries. Cta: Queries, Results, Keys
// and Values, its tiles; TOKENS of a step, SLOTS, PAGED, MAPPED, MASKED; State, Order, Smem.
// Params: those of common/attention.cuh, and piece_bits.
#pragma once
#include "common/dropped_keys.cuh"
#include "common/kv_server.cuh"
#include "common/logits.cuh"
#include "common/team_results.cuh"
#include "common/team_sight.cuh"
#include "common/team_slots.cuh"
#include "common/warpgroup_state.cuh"

namespace cukv {

template <typename KV, typename Cta, bool SOFT_CAP, typename Params>
struct Team {
    static constexpr int TOKENS = Cta::TOKENS;
    // Where the compiler finds registers for more forms of a step, items that begin with few keys
    // have their own for those scores, and for their sums.
    static constexpr int FEW = 64;
    static constexpr bool HAS_FEW =
        !SOFT_CAP && !Cta::MASKED && !Cta::PAGED && Cta::State::O_VALUES == 64;
    using Queries = typename Cta::Queries;
    using Keys = typename Cta::Keys;
    using Values = typename Cta::Values;

    const Params& p;
    typename Cta::Smem& smem;
    const int team, warp_idx, lane_idx;
    const int row;      // of the tile, the first of this lane's two; the other is 8 below
    float scale;        // of scores, to base 2
    float score_scale;  // of scores before they are capped
    typename Cta::State state;

    // The item.
    int slot = 0;
    uint32_t num_items = 0;
    int32_t token = 0;  // of the step
    int32_t first_token;
    TeamSight<Cta, Cta::MASKED> sight;
    bool starts = true;  // the sums that come next are the item's first

    RingPlace<Cta::K_STAGES> k;
    RingPlace<Cta::V_STAGES> v;
    bool k_here = false, v_here = false;
    DroppedKeys<Cta::MAPPED> dropped;  // of the step

    __device__ __forceinline__ Team(const Params& p, typename Cta::Smem& smem, int warp_idx)
        : p(p),
          smem(smem),
          team(warp_idx / 4 - 1),
          warp_idx(warp_idx),
          lane_idx(threadIdx.x % WARP_SIZE),
          row(team * Cta::TEAM_ROWS + warp_idx % 4 * 16 + lane_idx / 4) {
        // So small a scale stands for 0: it makes no finite score count, but hidden ones stay
        // hidden.
        score_scale = fmaxf(fabsf(Logits<Params>(p).scale), 1e-30f);
        scale = SOFT_CAP ? p.logits_soft_cap * LOG2_E : score_scale;
    }

    // Waits for the next item and its queries; false if there is none.
    __device__ __forceinline__ bool next_item() {
        const int next_slot = num_items % Cta::SLOTS;
        mbarrier_try_wait(smem.q_full[next_slot][team], num_items / Cta::SLOTS & 1);
        const Item item = smem.orders[next_slot][team].item;
        if (item.num_rows == 0) {
            return false;
        }
        slot = next_slot;
        ++num_items;
        token = last_step<TOKENS>(item) + TOKENS;
        first_token = first_step<TOKENS>(item);
        sight.begin(p, item, team, row);
        return true;
    }

    template <int KEYS>
    __device__ __forceinline__ void multiply_keys() {
        uint32_t q_tile = smem_address(smem.q[slot][team]);
        if constexpr (Cta::SLOTS == 1) {
            // Descriptors of the only place would stay in registers, which there are too few of.
            q_tile = opaque(q_tile);
        }
        const uint64_t a = Queries::descriptor(q_tile);
        const uint64_t b = Keys::descriptor(smem_address(smem.k[k.stage]));
#pragma unroll
        for (int i = 0; i < Queries::BYTES / Cta::TEAM_ROWS / 32; ++i) {
            wgmma_ss<KV>(
                state.template scores<KEYS>(), a + Queries::columns(i), b + Keys::columns(i),
                i > 0);
        }
        wgmma_commit_group();
    }

    template <int KEYS>
    __device__ __forceinline__ void multiply_values() {
        const uint64_t b = Values::descriptor(smem_address(smem.v[v.stage]));
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) {
            wgmma_rs_trans<KV>(state.o, state.weights[i], b + Values::rows(i), i > 0 || !starts);
        }
        wgmma_commit_group();
    }

    template <bool MASKED, int KEYS>
    __device__ __forceinline__ void weigh() {
        if constexpr (SOFT_CAP) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i) {
                float& x = state.s[i / 4][i % 4];
                x = tanh_of(x * score_scale);
            }
        }
        if constexpr (MASKED) {
            sight.hide(state.template scores<KEYS>(), token, [&](int tile, int i) {
                return !Cta::PAGED || !dropped.has(tile, i, p.piece_bits);
            });
        }
        state.template weigh<KEYS>(scale);
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

    // Scores of a step, and sums of the step before, of whose keys the first VALUES count.
    template <bool MASKED, int KEYS = TOKENS, int VALUES = TOKENS>
    __device__ __forceinline__ void step() {
        constexpr bool LAGS = !MASKED && !SOFT_CAP;
        if (!v_here) {
            mbarrier_try_wait(smem.v_full[v.stage], v.parity);
        }
        if constexpr (MASKED) {
            sight.load(p);
        }
        hold(state.template scores<KEYS>());
        hold(state.o);
        see_copies();
        wgmma_fence();
        multiply_keys<KEYS>();
        multiply_values<VALUES>();
        wgmma_wait_group<1>();
        hold(state.template scores<KEYS>());
        if constexpr (LAGS) {
            state.weigh_as_before(scale);
        } else {
            release_keys();
            weigh<MASKED, KEYS>();
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
        state.template pack<KEYS>();
    }

    // Stores what an item came to, or merges all items of its tile if it is the last.
    __device__ __forceinline__ void finish(int slot, const RowStates& rows) {
        typename Cta::Order& order = smem.orders[slot][team];
        const Item& item = order.item;
        float m[2], d[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            m[h] = rows.m[h] * scale;
            d[h] = rows.d[h] + __shfl_xor_sync(0xffffffffu, rows.d[h], 1);
            d[h] += __shfl_xor_sync(0xffffffffu, d[h], 2);
        }
        bool done = true;
        const int64_t split_row = item.first_slot < 0 ? 0 : p.levels.split_row(item);
        if (split_row < 0) {
            const TeamSlots<Cta::ROWS, Cta::State::O_VALUES * 2> slots{
                p.work, item, order.kv_head, team, row};
            slots.store(state.o, m, d);
            done = slots.takes_last_ticket(smem.last[team]);
            if (done) {
                slots.merge(state.o, m, d);
            }
        }
        const TeamResults<KV, Cta, Params> results{p, smem, state, team, warp_idx, lane_idx, row};
        const bool staged = done && results.store(slot, m, d, max(split_row, int64_t{0}));
        fence_proxy_async();
        if (lane_idx == 0 && warp_idx % 4 == 0) {
            order.results = staged;
        }
        mbarrier_arrive(smem.o_full[slot][team]);
    }

    // Behind the barriers of keys and values: lanes' own copies are writes of another proxy than
    // products read by.
    __device__ __forceinline__ void see_copies() const {
        if constexpr (!Cta::MAPPED) {
            fence_proxy_async();
        }
    }

    // What comes with the keys of a step.
    __device__ __forceinline__ void look_up() {
        if constexpr (Cta::PAGED) {
            dropped.bits = smem.k_dropped[k.stage][lane_idx % dropped.WORDS];
        }
        sight.look_up(smem, k.stage);
    }

    // Behind what all lanes have looked up with the keys.
    __device__ __forceinline__ void release_keys() {
        __syncwarp();
        if (lane_idx == 0) {
            mbarrier_arrive(smem.k_empty[k.stage]);
        }
    }

    // Before a step: whether its keys are here, and whether some row does not see all of them.
    __device__ __forceinline__ bool masked() {
        if (!k_here) {
            mbarrier_try_wait(smem.k_full[k.stage], k.parity);
            look_up();
        }
        return dropped.any() || !sight.sees_all(token);
    }

    // The first scores of an item, which no sums go with.
    __device__ __forceinline__ void begin() {
        token -= TOKENS;
        masked();
        sight.load(p);
        // So that no registers keep scores for these products while the item before is finished.
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) {
            state.s[i / 4][i % 4] = 0.0f;
        }
        hold(state.s);
        see_copies();
        wgmma_fence();
        multiply_keys<TOKENS>();
        wgmma_wait_group<0>();
        hold(state.s);
        release_keys();
        k.next();
        state.rows = RowStates{};
        starts = true;
        weigh<true, TOKENS>();
        state.template pack<TOKENS>();
    }

    // The last sums of an item, which no scores go with.
    __device__ __forceinline__ void end() {
        mbarrier_try_wait(smem.v_full[v.stage], v.parity);
        hold(state.o);
        see_copies();
        wgmma_fence();
        multiply_values<TOKENS>();
        wgmma_wait_group<0>();
        hold(state.o);
        if (lane_idx == 0) {
            mbarrier_arrive(smem.v_empty[v.stage]);
        }
        v.next();
        k_here = v_here = false;
        finish(slot, state.rows);
    }

    // A step that begins an item and ends the one before. Where the item begins with few keys,
    // neither their scores nor their sums are products of a whole step.
    __device__ __forceinline__ void pass_over(int old_slot) {
        const RowStates old = state.rows;
        state.rows = RowStates{};
        token -= TOKENS;
        masked();
        bool few = false;
        if constexpr (HAS_FEW) {
            few = sight.num_seen(token) <= FEW;
        }
        if (few) {
            step<true, FEW>();
        } else {
            step<true>();
        }
        finish(old_slot, old);
        starts = true;
        if (HAS_FEW && few && token > first_token) {
            token -= TOKENS;
            if (masked()) {
                token += TOKENS;
            } else {
                step<false, TOKENS, FEW>();
                starts = false;
            }
        }
    }

    __device__ __forceinline__ void attend() {
        bool has_item = next_item();
        while (has_item) {
            begin();
            while (true) {
                if (token > first_token) {
                    token -= TOKENS;
                    if (masked()) {
                        step<true>();
                        state.rescale();
                    } else {
                        step<false>();
                        if constexpr (SOFT_CAP) {
                            state.rescale();
                        }
                    }
                    starts = false;
                    continue;
                }
                // With one slot, the next item's queries come where this one's results are first.
                const int old_slot = slot;
                has_item = Cta::SLOTS > 1 && next_item();
                if (!has_item) {
                    break;
                }
                pass_over(old_slot);
            }
            end();
            has_item = Cta::SLOTS == 1 && next_item();
        }
    }
};

}  // namespace cukv
