// The levels of a cascade as attention launches see them: as requests of one batch.
//
// Every level divides the same rows into requests of its own. In the work lists row r of the leaves
// is row r, row r of the level above them is row num_rows + r, and so on. One launch attends to the
// keys above the leaves, and to those of leaves of many rows: it leaves states. The next one
// attends to the keys of the other leaves, and merges into every row what the first has left of it.
#pragma once
#include "common/queries.cuh"

namespace cukv {

struct Levels {
    const int32_t* q_rows;  // [num_levels, num_rows] row of q that each row is; null: itself
    const int32_t* o_rows;  // the same of o and lse, negative: of none; null: itself
    float* o;               // [num_levels, num_rows, num_qo_heads, head_dim_vo]; null: no states
    float* lse;             // [num_levels, num_rows, num_qo_heads] base 2, -inf where o is nothing
    int64_t num_rows;
    int32_t num_levels;  // that states lie at: one for each item of a shared tile, if they merge
    int32_t q_adjacent;  // 1: adjacent rows of a request are adjacent rows of q
    int32_t num_splits;  // where they are left: shared tiles of as many items are not merged

    // How many rows behind those of its tile an item leaves its states; -1: they go to a slot.
    __device__ __forceinline__ int64_t split_row(const Item& item) const {
        const bool apart = item.num_items <= num_splits && item.first_q_row >= num_rows;
        return apart ? item.item_idx * (num_levels - 1) * num_rows : -1;
    }

    // Whether this launch merges the states that the one before it leaves.
    __device__ __forceinline__ bool given() const { return o != nullptr; }

    // Stores four sums of a leaf's row as the state of level 0, and with the first its lse.
    __device__ __forceinline__ void keep(
        const State<1, 4>& state,
        const PackedRow& at,
        int num_qo_heads,
        int head_dim,
        int feat) const {
        const int64_t row = at.q_row * num_qo_heads + at.qo_head;
        const float factor = state.d > 0.0f ? 1.0f / state.d : 0.0f;
        const float (&x)[4] = state.o[0];
        *reinterpret_cast<float4*>(o + row * head_dim + feat) =
            make_float4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
        if (feat == 0) {
            lse[row] = state.m + log2f(state.d);
        }
    }

    // Adds to sums of NUM rows of leaves the states of all levels. Rows that are not `here` are
    // none.
    template <int NUM>
    __device__ __forceinline__ void add_all_to(
        State<1, 4> (&states)[NUM],
        const PackedRow (&at)[NUM],
        const bool (&here)[NUM],
        int num_qo_heads,
        int head_dim,
        int feat) const {
        constexpr int IN_FLIGHT = 4;
#pragma unroll 1
        for (int32_t base = 0; base < num_levels; base += IN_FLIGHT) {
            int64_t row[NUM][IN_FLIGHT];
            float m[NUM][IN_FLIGHT];
            float4 x[NUM][IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < NUM * IN_FLIGHT; ++i) {
                const int32_t level = base + i % IN_FLIGHT;
                const PackedRow& of = at[i / IN_FLIGHT];
                row[i / IN_FLIGHT][i % IN_FLIGHT] =
                    (level * num_rows + of.q_row) * num_qo_heads + of.qo_head;
                float& found = m[i / IN_FLIGHT][i % IN_FLIGHT];
                found = NO_KEY;
                if (here[i / IN_FLIGHT] && level < num_levels) {
                    found = __ldcg(lse + row[i / IN_FLIGHT][i % IN_FLIGHT]);
                }
            }
#pragma unroll
            for (int i = 0; i < NUM * IN_FLIGHT; ++i) {
                float4& to = x[i / IN_FLIGHT][i % IN_FLIGHT];
                to = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (m[i / IN_FLIGHT][i % IN_FLIGHT] > NO_KEY) {
                    const int64_t from = row[i / IN_FLIGHT][i % IN_FLIGHT] * head_dim + feat;
                    to = __ldcg(reinterpret_cast<const float4*>(o + from));
                }
            }
#pragma unroll
            for (int n = 0; n < NUM; ++n) {
                float largest = states[n].m;
#pragma unroll
                for (int i = 0; i < IN_FLIGHT; ++i) {
                    largest = fmaxf(largest, m[n][i]);
                }
                states[n].raise(largest);
#pragma unroll
                for (int i = 0; i < IN_FLIGHT; ++i) {
                    const float4& y = x[n][i];
                    const float sums[1][4] = {{y.x, y.y, y.z, y.w}};
                    states[n].add(m[n][i], 1.0f, sums);
                }
            }
        }
    }

    // Adds to four sums of a leaf's row what was left of it, at levels from `first` on.
    __device__ __forceinline__ void add_to(
        State<1, 4>& state,
        const PackedRow& at,
        int32_t first,
        int num_qo_heads,
        int head_dim,
        int feat) const {
        constexpr int IN_FLIGHT = 4;
        for (int32_t base = first; base < num_levels; base += IN_FLIGHT) {
            const auto row = [&](int i) {
                const int32_t level = min(base + i, num_levels - 1);
                return (level * num_rows + at.q_row) * num_qo_heads + at.qo_head;
            };
            float m[IN_FLIGHT], largest = state.m;
            float4 x[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const float found = __ldcg(lse + row(i));
                m[i] = base + i < num_levels ? found : NO_KEY;
                largest = fmaxf(largest, m[i]);
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (m[i] > NO_KEY) {
                    x[i] = __ldcg(reinterpret_cast<const float4*>(o + row(i) * head_dim + feat));
                }
            }
            state.raise(largest);
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const float sums[1][4] = {{x[i].x, x[i].y, x[i].z, x[i].w}};
                state.add(m[i], 1.0f, sums);
            }
        }
    }
};

}  // namespace cukv
