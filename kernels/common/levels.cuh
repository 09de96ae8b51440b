// The levels of a cascade as attention launches see them: as requests of one batch.
//
// Every level divides the same rows into requests of its own. In the work lists row r of the leaves
// is row r, row r of the level above them is row num_rows + r, and so on. One launch attends to the
// keys above the leaves, and to those of leaves of many rows: it leaves states. The next one
// attends to the keys of the other leaves, and merges into every row what the first has left of it.
#pragma once
#include "common/queries.cuh"

namespace cukv {

// What was left of a leaf's row, on its way: four sums of each of a few states at a time.
struct LeftStates {
    static constexpr int IN_FLIGHT = 4;

    const float* lse;
    const float* o;
    int64_t state_rows;  // from a state to the next
    int32_t head_dim;
    int32_t num_states;  // that are not loaded yet
    float m[IN_FLIGHT];
    float4 x[IN_FLIGHT];

    // Sums do not wait for what says whether there are any: one look-up less.
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            m[i] = NO_KEY;
            x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (i < num_states) {
                m[i] = __ldcg(lse);
                x[i] = __ldcg(reinterpret_cast<const float4*>(o));
                lse += state_rows;
                o += state_rows * head_dim;
            }
        }
        num_states -= IN_FLIGHT;
    }

    __device__ __forceinline__ void add_loaded(State<1, 4>& state) const {
        float largest = state.m;
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            largest = fmaxf(largest, m[i]);
        }
        state.raise(largest);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const bool live = m[i] > NO_KEY;  // or else nobody has written sums
            const float sums[1][4] = {
                {live ? x[i].x : 0.0f, live ? x[i].y : 0.0f, live ? x[i].z : 0.0f,
                 live ? x[i].w : 0.0f}};
            state.add(m[i], 1.0f, sums);
        }
    }

    // Adds what load() has started to load, and the states behind them.
    __device__ __forceinline__ void add_to(State<1, 4>& state) {
        add_loaded(state);
        while (num_states > 0) {
            load();
            add_loaded(state);
        }
    }
};

struct Levels {
    const int32_t* q_rows;  // [levels, num_rows] row of q that each row is; null: itself
    const int32_t* o_rows;  // the same of o and lse, negative: of none; null: itself
    const float* o;         // [num_states, num_rows, num_qo_heads, head_dim_vo]; null: no states
    const float* lse;       // [num_states, num_rows, num_qo_heads] base 2, -inf where o is nothing
    int64_t num_rows;
    int32_t num_levels;
    int32_t q_adjacent;  // 1: adjacent rows of a request are adjacent rows of q
    int32_t num_splits;  // where states are left: shared tiles of as many items are not merged
    int32_t num_states;  // of a row, where they are merged: of all levels and splits

    // How many rows behind those of its tile an item leaves its states: those of the i-th items lie
    // behind those of the items before them. -1: it leaves them in a slot.
    __device__ __forceinline__ int64_t split_row(const Item& item) const {
        const bool apart = item.num_items <= num_splits && item.first_q_row >= num_rows;
        return apart ? item.item_idx * (num_levels - 1) * num_rows : -1;
    }

    // Whether this launch merges the states that the one before it leaves.
    __device__ __forceinline__ bool given() const { return o != nullptr; }

    // Where four sums of a leaf's row lie, of its states from `first` on.
    __device__ __forceinline__ LeftStates
    left_of(const PackedRow& at, int32_t first, int num_qo_heads, int head_dim, int feat) const {
        const int64_t state_rows = num_rows * num_qo_heads;
        const int64_t row = first * state_rows + at.q_row * num_qo_heads + at.qo_head;
        return {lse + row, o + row * head_dim + feat, state_rows, head_dim, num_states - first};
    }
};

}  // namespace cukv
