// A team (see common/team.cuh) that multiplies e4m3 as it is: queries with keys, and weights, which
// become e4m3 too, with values that common/fp8_values.cuh has laid out.
//
// Products of e4m3 take half the time of others, and so about as long as the exponentials: while
// one team weighs, the other multiplies. Queries are in registers, which leaves shared memory to
// keys and values.
//
// Tensor cores keep about 14 bits of sums of e4m3. Scores are off by 2^-11 of themselves at most;
// and for every 32 keys the sums lose 2^-15 of what is there on average, which adds up where values
// have one sign: to 2^-8 over 8192 keys. Sums of a step apart from those before would need
// registers that there are not.
#pragma once
#include "common/ptx_wgmma_fp8.cuh"
#include "common/team.cuh"

namespace cukv {

// The online softmax of a warpgroup's 64 rows, a lane holding rows g and g + 8 of its warp's 16.
template <int TOKENS, int HEAD_DIM>
struct Fp8State {
    // log2 of the weight that a row's largest score so far has: e4m3 reaches from 2^-9 to 448.
    static constexpr float LARGEST = 8.0f;
    static constexpr int O_VALUES = HEAD_DIM / 2;  // sums of a lane

    float s[TOKENS / 8][4];  // scores, then weights
    float o[HEAD_DIM / 8][4];
    uint32_t weights[TOKENS / 32][4];  // as e4m3, the product's left operand
    RowStates rows;
    float step_sum[2];  // this lane's of each row's weights
    float factor[2];    // of the sums so far
    static_assert(TOKENS % 32 == 0, "a product takes the weights of 32 keys");

    // Scores become weights of the maxima so far, with the step's among them.
    __device__ __forceinline__ void weigh(float scale) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float m = rows.m[h];
#pragma unroll
            for (int tile = 0; tile < TOKENS / 8; ++tile) {
                m = fmaxf(m, fmaxf(s[tile][2 * h], s[tile][2 * h + 1]));
            }
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
            const float largest = m > NO_KEY ? __fmul_rn(m, scale) : 0.0f;
            float sum = 0.0f;
#pragma unroll
            for (int tile = 0; tile < TOKENS / 8; ++tile) {
                float* pair = &s[tile][2 * h];
                pair[0] = ex2(fmaf(pair[0], scale, LARGEST - largest));
                pair[1] = ex2(fmaf(pair[1], scale, LARGEST - largest));
                sum += pair[0] + pair[1];
            }
            step_sum[h] = sum;
            factor[h] = ex2(__fmul_rn(rows.m[h], scale) - largest);
            rows.d[h] = fmaf(rows.d[h], factor[h], sum);
            rows.m[h] = m;
        }
    }

    // Rounds the weights, once no product reads those before them.
    __device__ __forceinline__ void pack() {
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i) {
            // A lane's weights of 16 keys, in its order of them.
            const float *low = &s[i / 2 * 2][i % 2 * 2], *high = &s[i / 2 * 2 + 1][i % 2 * 2];
            weights[i / 4][i % 4] = cvt_e4m3x4(low[0], low[1], high[0], high[1]);
        }
    }

    // Makes the sums those of the newest maxima.
    __device__ __forceinline__ void rescale() {
        if (__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < O_VALUES; ++i) {
                o[i / 4][i % 4] *= factor[i % 4 / 2];
            }
        }
    }
};

// Cta: as for Team, with Fp8State.
template <typename KV, typename Cta, typename Params>
struct Fp8Team : Team<KV, Cta, false, Params> {
    using Base = Team<KV, Cta, false, Params>;
    using Base::first_token, Base::k, Base::lane_idx, Base::p, Base::scale, Base::sight;
    using Base::slot, Base::smem, Base::state, Base::team, Base::token, Base::TOKENS, Base::v;
    using Base::warp_idx;
    using typename Base::Keys;
    using typename Base::Queries;
    using typename Base::Values;

    uint32_t q[Queries::COLUMNS / 16][4];  // the item's queries, as left operands

    __device__ __forceinline__ Fp8Team(const Params& p, typename Cta::Smem& smem, int warp_idx)
        : Base(p, smem, warp_idx) {}

    // Takes a new item's queries, and forgets the rows before.
    __device__ __forceinline__ void begin() {
        const uint32_t tile = smem_address(smem.q[slot][team]);
        const int tile_row = warp_idx % 4 * 16 + lane_idx % 16;
#pragma unroll
        for (int i = 0; i < Queries::COLUMNS / 16; ++i) {
            ldmatrix_x4(q[i], tile + Queries::offset(tile_row, 2 * i + lane_idx / 16));
        }
        state.rows = RowStates{};
    }

    // Sums of none of an item's keys.
    __device__ __forceinline__ void clear_sums() {
#pragma unroll
        for (int i = 0; i < Cta::State::O_VALUES; ++i) {
            state.o[i / 4][i % 4] = 0.0f;
        }
    }

    __device__ __forceinline__ void multiply_keys() {
        const uint64_t b = Keys::descriptor(smem_address(smem.k[k.stage]));
#pragma unroll
        for (int i = 0; i < Queries::COLUMNS / 16; ++i) {
            wgmma_rs_e4m3(state.s, q[i], b + Keys::columns(i), i > 0);
        }
        wgmma_commit_group();
    }

    __device__ __forceinline__ void multiply_values() {
        const uint64_t b = Values::descriptor(smem_address(smem.v[v.stage]));
#pragma unroll
        for (int i = 0; i < TOKENS / 32; ++i) {
            wgmma_rs_e4m3(state.o, state.weights[i], b + Values::columns(i), 1);
        }
        wgmma_commit_group();
    }

    __device__ __forceinline__ void weigh(bool masked) {
        if (masked) {
            sight.hide(state.s, token, [&](int tile, int i) {
                return !Cta::PAGED || !Base::dropped.has(tile, i, p.piece_bits);
            });
        }
        state.weigh(scale);
    }

    // The first scores of the first item, which no sums go with.
    __device__ __forceinline__ void first_scores() {
        token -= TOKENS;
        const bool masked = Base::masked();
        hold(state.s);
        wgmma_fence();
        multiply_keys();
        wgmma_wait_group<0>();
        hold(state.s);
        Base::release_keys();
        k.next();
        weigh(masked);
        state.pack();
    }

    __device__ __forceinline__ void release_values() {
        if (lane_idx == 0) {
            mbarrier_arrive(smem.v_empty[v.stage]);
        }
        v.next();
    }

    // Scores of a step, and sums of the step before.
    __device__ __forceinline__ void step() {
        token -= TOKENS;
        const bool masked = Base::masked();
        mbarrier_try_wait(smem.v_full[v.stage], v.parity);
        hold(state.s);
        hold(state.o);
        wgmma_fence();
        multiply_keys();
        multiply_values();
        wgmma_wait_group<1>();
        hold(state.s);
        Base::release_keys();
        k.next();
        weigh(masked);
        // Keeps the wait behind the weights, as in Team.
        st_shared_if(
            lane_idx == 0, smem.unread[warp_idx - 4], state.step_sum[0] + state.step_sum[1]);
        wgmma_wait_group<0>();
        hold(state.o);
        release_values();
        state.pack();
    }

    __device__ __forceinline__ void last_sums() {
        mbarrier_try_wait(smem.v_full[v.stage], v.parity);
        hold(state.o);
        wgmma_fence();
        multiply_values();
        wgmma_wait_group<0>();
        hold(state.o);
        release_values();
    }

    __device__ __forceinline__ void finish(int item_slot, RowStates rows) {
        // Weights are 2^LARGEST times those relative to the maxima.
        rows.m[0] -= __fdividef(Cta::State::LARGEST, scale);
        rows.m[1] -= __fdividef(Cta::State::LARGEST, scale);
        Base::finish(item_slot, rows);
    }

    // Items follow each other without a pause: the last sums of one go with the next one's first
    // scores.
    __device__ __forceinline__ void attend() {
        if (!Base::next_item()) {
            return;
        }
        begin();
        clear_sums();
        first_scores();
        while (true) {
            while (token > first_token) {
                step();
                state.rescale();
            }
            const int old_slot = slot;
            const RowStates old = state.rows;
            if (!Base::next_item()) {
                break;
            }
            begin();
            step();
            finish(old_slot, old);
            clear_sums();
        }
        last_sums();
        finish(slot, state.rows);
    }
};

}  // namespace cukv
