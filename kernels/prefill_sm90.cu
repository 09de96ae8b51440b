// prefill_sm90 -- attend from tiles of 128 packed query rows to keys that a tensor map reads, on sm_90a.
//
//   s[r, j] = sm_scale * q[r] . k[j] (soft-capped), for the keys j of the item that row r sees
//   o[r] = sum_j softmax(s[r])[j] * v[j],  lse[r] = log2(sum_j 2^(s[r, j] * log2(e)))
//
// The query heads of a KV head, times the query rows of a request, are the rows of a tile. A CTA has
// two teams of a warpgroup and 64 rows each, and four warps that serve them:
//
//   warp 0  copies keys, a step of TOKENS at a time          warp 1    copies values
//   warps 2, 3  bring a team's queries and take its results  warps 4-7, 8-11  teams 0, 1
//
// Teams never pause between items: the first scores of an item are computed together with the last
// sums of the one before, whose results go out through the memory of its queries.
// Bound by tensor cores: 2 * (head_dim + head_dim_vo) operations per row and key.
// Host: cukv/paged.py PagedKVCache.prefill, cukv/ragged.py RaggedTensor.prefill
// Reference: cukv/reference.py prefill
#include "common/attention.cuh"
#include "common/kv_server.cuh"
#include "common/logits.cuh"
#include "common/row_server.cuh"
#include "common/team_slots.cuh"
#include "common/warpgroup_state.cuh"

namespace cukv {

struct PrefillSm90Params : AttentionParams {
    TensorMap q_map;
    TensorMap o_map;
    TensorMap k_map;
    TensorMap v_map;
    int32_t q_mapped;  // 1: there is a map of q
    int32_t o_mapped;
    int32_t k_head_spans;  // from a head to the next, in units of 128 bytes
    int32_t v_head_spans;
    int32_t piece_bits;     // log2 of the tokens of a page that one copy brings
    int32_t heads_at_once;  // KV heads that are worked on at a time
};

static_assert(
    sizeof(PrefillSm90Params) == PARAMS_BYTES, "host and device disagree on the parameters");

// Geometry of one specialisation, and its shared memory.
template <typename KV, int HEAD_DIM_QK, int HEAD_DIM_VO, int TOKENS_, int SLOTS_, bool PAGED_>
struct PrefillSm90Cta {
    static constexpr int TOKENS = TOKENS_, STAGES = 2;
    static constexpr int SLOTS = SLOTS_;  // items whose queries or results are here
    static constexpr int DEALT = 4;       // items that were dealt and not yet begun by all
    static constexpr bool PAGED = PAGED_;
    static constexpr int TEAMS = 2, TEAM_ROWS = 64, TEAM_THREADS = 128, ROWS = TEAMS * TEAM_ROWS;
    static constexpr int THREADS = (TEAMS + 1) * TEAM_THREADS;
    // 128 * (56 + 2 * 224) = 64512 registers, all that a CTA of 384 threads has.
    static constexpr int SERVER_REGISTERS = HEAD_DIM_VO > 64 ? 56 : 88;
    static constexpr int TEAM_REGISTERS = HEAD_DIM_VO > 64 ? 224 : 208;
    static_assert(HEAD_DIM_VO <= HEAD_DIM_QK, "results take the place of queries");

    using Queries = OperandTile<TEAM_ROWS, HEAD_DIM_QK, false>;
    using Results = OperandTile<TEAM_ROWS, HEAD_DIM_VO, false>;
    using Keys = OperandTile<TOKENS, HEAD_DIM_QK, PAGED>;
    using Values = OperandTile<TOKENS, HEAD_DIM_VO, PAGED>;
    using State = WarpgroupState<KV, TOKENS, HEAD_DIM_VO>;
    using Place = RingPlace<STAGES>;

    // What a team is given with its queries; an item without rows ends its work.
    struct alignas(16) Order {
        Item item;
        int32_t kv_head;
        int32_t results;  // from the team: whether they lie where its queries were
    };

    struct Smem {
        alignas(1024) char q[SLOTS][TEAMS][Queries::BYTES];
        char k[STAGES][Keys::BYTES];
        char v[STAGES][Values::BYTES];
        Order orders[SLOTS][TEAMS], dealt[DEALT];
        uint64_t dealt_full[DEALT], dealt_empty[DEALT];
        uint64_t q_full[SLOTS][TEAMS], o_full[SLOTS][TEAMS];
        uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
        uint64_t v_landed;           // values whose last rows are still to be zeroed
        uint32_t k_dropped[STAGES];  // pieces of a step whose page does not exist
        int32_t last[TEAMS];         // whether the team has the last ticket
        float unread[TEAMS * 4];     // of each warp
    };

    static __device__ __forceinline__ void set_up(Smem& smem) {
        for (int i = 0; i < SLOTS * TEAMS; ++i) {
            mbarrier_init(smem.q_full[i / TEAMS][i % TEAMS], 1);
            mbarrier_init(smem.o_full[i / TEAMS][i % TEAMS], TEAM_THREADS);
        }
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(smem.k_full[stage], 1);
            mbarrier_init(smem.v_full[stage], 1);
            mbarrier_init(smem.k_empty[stage], TEAMS * 4);  // one lane of each warp
            mbarrier_init(smem.v_empty[stage], TEAMS * 4);
        }
        for (int i = 0; i < DEALT; ++i) {
            mbarrier_init(smem.dealt_full[i], 1);
            mbarrier_init(smem.dealt_empty[i], 1 + TEAMS);  // who copies values, who serves teams
        }
        mbarrier_init(smem.v_landed, 1);
        fence_mbarrier_init();
    }

    static __device__ __forceinline__ int own_rows(const Item& item, int team) {
        return min(max(item.num_rows - team * TEAM_ROWS, 0), TEAM_ROWS);
    }
};

// Warps 4 to 11, by fours: 64 rows of each item.
template <typename KV, typename Cta, bool SOFT_CAP>
struct Team {
    static constexpr int TOKENS = Cta::TOKENS;
    using Queries = typename Cta::Queries;
    using Keys = typename Cta::Keys;
    using Values = typename Cta::Values;

    const PrefillSm90Params& p;
    typename Cta::Smem& smem;
    const int team, warp_idx, lane_idx;
    const int row;      // of the tile, the first of this lane's two; the other is 8 below
    float scale;        // of scores, to base 2
    float score_scale;  // of scores before they are capped
    typename Cta::State state;

    // The item: keys that all rows see, and that each of this lane's rows sees.
    int slot = 0;
    uint32_t num_items = 0;
    int32_t token = 0;  // of the step
    int32_t first_token, all_from, all_to, from[2], to[2];
    bool starts = true;  // the sums that come next are the item's first

    typename Cta::Place k, v;
    bool k_here = false, v_here = false;
    uint32_t dropped = 0;  // pieces of the step

    __device__ __forceinline__
    Team(const PrefillSm90Params& p, typename Cta::Smem& smem, int warp_idx)
        : p(p),
          smem(smem),
          team(warp_idx / 4 - 1),
          warp_idx(warp_idx),
          lane_idx(threadIdx.x % WARP_SIZE),
          row(team * Cta::TEAM_ROWS + warp_idx % 4 * 16 + lane_idx / 4) {
        // So small a scale stands for 0: it makes no finite score count, but hidden ones stay hidden.
        score_scale = fmaxf(fabsf(Logits<PrefillSm90Params>(p).scale), 1e-30f);
        scale = SOFT_CAP ? p.logits_soft_cap * LOG2_E : score_scale;
    }

    // Waits for the next item and its queries; false if there is none.
    __device__ __forceinline__ bool next_item() {
        const int next_slot = num_items % Cta::SLOTS;
        mbarrier_try_wait(smem.q_full[next_slot][team], num_items / Cta::SLOTS & 1);
        Item item = smem.orders[next_slot][team].item;
        if (item.num_rows == 0) {
            return false;
        }
        slot = next_slot;
        ++num_items;
        token = last_step<TOKENS>(item) + TOKENS;
        first_token = first_step<TOKENS>(item);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int32_t position =
                item.diagonal +
                static_cast<int32_t>(p.group.quotient(item.first_row + row + 8 * h));
            from[h] = p.window_left < 0 ? item.first_token
                                        : max(item.first_token, position - p.window_left);
            to[h] = p.causal ? min(item.end_token, position + 1) : item.end_token;
        }
        const int first = team * Cta::TEAM_ROWS;
        item.first_row += first;
        item.num_rows = max(Cta::own_rows(smem.orders[next_slot][team].item, team), 1);
        const Sight sight(p, item);
        all_from = max(item.first_token, sight.all_from);
        all_to = min(item.end_token, sight.all_to);
        return true;
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

    __device__ __forceinline__ void multiply_values() {
        const uint64_t b = Values::descriptor(smem_address(smem.v[v.stage]));
#pragma unroll
        for (int i = 0; i < TOKENS / 16; ++i) {
            wgmma_rs_trans<KV>(state.o, state.weights[i], b + Values::rows(i), i > 0 || !starts);
        }
        wgmma_commit_group();
    }

    // Hides the scores of keys that a row does not see, or that do not exist.
    __device__ __forceinline__ void mask() {
        uint32_t first[2], num[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            first[h] = token + lane_idx % 4 * 2 - from[h];
            num[h] = max(to[h] - from[h], 0);
        }
#pragma unroll
        for (int tile = 0; tile < TOKENS / 8; ++tile) {
            const bool exists = !Cta::PAGED || !(dropped >> (tile * 8 >> p.piece_bits) & 1);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool seen = first[i / 2] + tile * 8 + i % 2 < num[i / 2];
                state.s[tile][i] = seen && exists ? state.s[tile][i] : NO_KEY;
            }
        }
    }

    template <bool MASKED>
    __device__ __forceinline__ void weigh() {
        if constexpr (SOFT_CAP) {
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) {
                float& x = state.s[i / 4][i % 4];
                x = tanh_by_ex2(x * score_scale);
            }
        }
        if constexpr (MASKED) {
            mask();
        }
        state.weigh(scale);
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

    // Scores of a step, and sums of the step before.
    template <bool MASKED>
    __device__ __forceinline__ void step() {
        constexpr bool LAGS = !MASKED && !SOFT_CAP;
        if (!v_here) {
            mbarrier_try_wait(smem.v_full[v.stage], v.parity);
        }
        hold(state.s);
        hold(state.o);
        wgmma_fence();
        multiply_keys();
        multiply_values();
        wgmma_wait_group<1>();
        hold(state.s);
        if constexpr (LAGS) {
            state.weigh_by_old_maximum(scale);
        } else {
            if (lane_idx == 0) {
                mbarrier_arrive(smem.k_empty[k.stage]);
            }
            weigh<MASKED>();
        }
        // The compiler moves the wait up to the maximum, unless what comes before it needs the weights
        // and touches memory.
        st_shared_if(
            lane_idx == 0, smem.unread[warp_idx - 4], state.step_sum[0] + state.step_sum[1]);
        wgmma_wait_group<0>();
        hold(state.o);
        if (lane_idx == 0) {
            mbarrier_arrive(smem.v_empty[v.stage]);
        }
        if constexpr (LAGS) {
            state.catch_up(scale, [&](float (&s)[TOKENS / 8][4]) { rescore(s); });
            if (lane_idx == 0) {
                mbarrier_arrive(smem.k_empty[k.stage]);
            }
        }
        k.next();
        v.next();
        // Asked early, needed by the next step.
        k_here = mbarrier_test_wait(smem.k_full[k.stage], k.parity);
        v_here = mbarrier_test_wait(smem.v_full[v.stage], v.parity);
        dropped = Cta::PAGED ? smem.k_dropped[k.stage] : 0;
        state.pack();
    }

    // Stores what an item came to, or merges all items of its tile if it is the last.
    __device__ __forceinline__ void finish(int slot, RowStates rows) {
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
        if (item.first_slot >= 0) {
#pragma unroll
            for (int i = 0; i < Cta::State::O_VALUES; ++i) {
                state.o[i / 4][i % 4] *= rows.behind[i % 4 / 2];
            }
            rows.behind[0] = rows.behind[1] = 1.0f;
            const TeamSlots<Cta::ROWS, Cta::State::O_VALUES * 2> slots{
                p.work, item, order.kv_head, team, row};
            slots.store(state.o, m, d);
            done = slots.takes_last_ticket(smem.last[team]);
            if (done) {
                slots.merge(state.o, m, d);
            }
        }
        const bool results = done && store(slot, m, d, rows.behind);
        fence_proxy_async();
        if (lane_idx == 0 && warp_idx % 4 == 0) {
            order.results = results;
        }
        mbarrier_arrive(smem.o_full[slot][team]);
    }

    // Stores finished rows; true: as results in the memory of their queries.
    __device__ __forceinline__ bool store(
        int slot, const float (&m)[2], const float (&d)[2], const float (&behind)[2]) {
        constexpr int KIND = is_same<KV, half> ? KIND_HALF : KIND_BFLOAT16;
        const typename Cta::Order& order = smem.orders[slot][team];
        const bool staged = p.o_rows.kind == KIND && p.o_rows.aligned;
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at_row = row + 8 * h;
            const PackedRow at(p.group, order.item, order.kv_head, at_row);
            RowResult<PrefillSm90Params> result(p, at, m[h], d[h]);
            result.factor *= behind[h];
            factor[h] = result.factor;
            if (at_row < order.item.num_rows) {
                if (lane_idx % 4 == 0) {
                    result.store_lse();
                }
            }
            if (!staged) {
#pragma unroll
                for (int tile = 0; tile < Cta::State::O_VALUES / 4; tile += 2) {
                    float sums[4];
                    const int feat =
                        tile * 8 +
                        neighbours<KV>(sums, &state.o[tile][2 * h], &state.o[tile + 1][2 * h]);
                    if (at_row < order.item.num_rows && feat < p.head_dim_vo) {
                        result.store(sums, feat);
                    }
                }
            }
        }
        if (staged) {
            const uint32_t tile = smem_address(smem.q[slot][team]);
            const int tile_row = warp_idx % 4 * 16 + lane_idx % 16;
#pragma unroll
            for (int i = 0; i < Cta::State::O_VALUES / 8; ++i) {
                uint32_t x[4];
#pragma unroll
                for (int j = 0; j < 4;
                     ++j) {  // adding 0 makes the results of a row without keys +0
                    const float* pair = &state.o[2 * i + j / 2][j % 2 * 2];
                    x[j] = cvt_pair<KV>(
                        fmaf(pair[0], factor[j % 2], 0.0f), fmaf(pair[1], factor[j % 2], 0.0f));
                }
                stmatrix_x4(tile + Cta::Results::offset(tile_row, 2 * i + lane_idx / 16), x);
            }
        }
        return staged;
    }

    // Before a step: whether its keys are here, and whether some row does not see all of them.
    __device__ __forceinline__ bool masked() {
        if (!k_here) {
            mbarrier_try_wait(smem.k_full[k.stage], k.parity);
            dropped = Cta::PAGED ? smem.k_dropped[k.stage] : 0;
        }
        return dropped != 0 || token < all_from || token + TOKENS > all_to;
    }

    // The first scores of an item, which no sums go with.
    __device__ __forceinline__ void begin() {
        token -= TOKENS;
        masked();
        hold(state.s);
        wgmma_fence();
        multiply_keys();
        wgmma_wait_group<0>();
        hold(state.s);
        if (lane_idx == 0) {
            mbarrier_arrive(smem.k_empty[k.stage]);
        }
        k.next();
        state.rows = RowStates{};
        starts = true;
        weigh<true>();
        state.pack();
    }

    // The last sums of an item, which no scores go with.
    __device__ __forceinline__ void end() {
        mbarrier_try_wait(smem.v_full[v.stage], v.parity);
        hold(state.o);
        wgmma_fence();
        multiply_values();
        wgmma_wait_group<0>();
        hold(state.o);
        if (lane_idx == 0) {
            mbarrier_arrive(smem.v_empty[v.stage]);
        }
        v.next();
        k_here = false;
        finish(slot, state.rows);
    }

    // A step that begins an item and ends the one before.
    __device__ __forceinline__ void pass_over(int old_slot) {
        const RowStates old = state.rows;
        state.rows = RowStates{};
        token -= TOKENS;
        masked();
        step<true>();
        finish(old_slot, old);
        starts = true;
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
                    } else {
                        step<false>();
                    }
                    state.rescale();
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

template <
    typename KV,
    int HEAD_DIM_QK,
    int HEAD_DIM_VO,
    int TOKENS,
    int SLOTS,
    bool PAGED,
    bool SOFT_CAP>
__global__ void __launch_bounds__(384, 1)
    prefill_sm90(const __grid_constant__ PrefillSm90Params p) {
    using Cta = PrefillSm90Cta<KV, HEAD_DIM_QK, HEAD_DIM_VO, TOKENS, SLOTS, PAGED>;
    static_assert(Cta::THREADS == 384, "as the launch bounds say");
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<typename Cta::Smem*>(smem_bytes);
    // The same in all lanes, which the compiler is told: descriptors then take no lane's registers.
    const int warp_idx = __shfl_sync(0xffffffffu, threadIdx.x / WARP_SIZE, 0);

    // 1 barriers
    if (threadIdx.x == 0) {
        Cta::set_up(smem);
    }
    __syncthreads();

    // 2 each warp its task
    if (warp_idx < 4) {
        setmaxnreg_dec<Cta::SERVER_REGISTERS>();
        if (warp_idx == 0) {
            serve_keys<Cta>(p, smem);
        } else if (warp_idx == 1) {
            serve_values<Cta>(p, smem);
        } else {
            RowServer<Cta, PrefillSm90Params>{p, smem, warp_idx - 2}.serve();
        }
    } else {
        setmaxnreg_inc<Cta::TEAM_REGISTERS>();
        Team<KV, Cta, SOFT_CAP>(p, smem, warp_idx).attend();
    }
}

}  // namespace cukv
