// States of a tile of several items, in global memory until the last item's CTA merges them.
//
// A slot is the state of one item and KV head: [rows, 2] maximum and denominator, and [rows,
// head_dim] sums, which common/latent_slots.cuh lays out otherwise. A tile's slots are merged in
// the order of its keys, so that a result does not depend on which CTA comes last.
#pragma once
#include "common/softmax.cuh"
#include "common/work.cuh"

namespace cukv {

template <int ROWS, int HEAD_DIM>
struct Slots {
    static constexpr int IN_FLIGHT = 8;  // states whose loads a thread starts together

    const WorkList& work;
    const Item& item;
    int kv_head;

    // Of a row of the tile's i-th item, among all rows of all slots.
    __device__ __forceinline__ int64_t slot_row(int32_t i, int row) const {
        return (int64_t{item.slot(i)} * work.num_kv_heads + kv_head) * ROWS + row;
    }

    // Where the sums of a row are left.
    __device__ __forceinline__ float* sums_of_row(int row) const {
        return work.sums + slot_row(item.item_idx, row) * HEAD_DIM;
    }

    static __device__ __forceinline__ void store_sums(const float (&sums)[4], float* to) {
        // Not by an assignment: the compiler would make four stores of it.
        __stcg(reinterpret_cast<float4*>(to), make_float4(sums[0], sums[1], sums[2], sums[3]));
    }

    __device__ __forceinline__ void store_sums(const float (&sums)[4], int row, int feat) const {
        store_sums(sums, sums_of_row(row) + feat);
    }

    __device__ __forceinline__ void store_state(float m, float d, int row) const {
        float* to = work.states + slot_row(item.item_idx, row) * 2;
        *reinterpret_cast<float2*>(to) = make_float2(m, d);
    }

    // Whether this CTA is the last of the tile's: then all its slots are written. `last` is shared.
    __device__ __forceinline__ bool takes_last_ticket(int32_t& last) const {
        __syncthreads();  // the slot is written; thread 0 publishes it for all
        if (threadIdx.x == 0) {
            int32_t* ticket = work.tickets + int64_t{item.first_slot} * work.num_kv_heads + kv_head;
            last = atom_add_acq_rel(ticket, 1) == item.num_items - 1;
            if (last) {
                *ticket = 0;  // for the next launch
            }
        }
        __syncthreads();  // `last` is there
        return last;
    }

    // Calls visit(state, row, feat) for vectors of four sums of the tile's rows, each merged over
    // all items: over many by two lanes, of which the first visits.
    template <int THREADS, typename Visit>
    __device__ __forceinline__ void each_vector(int head_dim, Visit visit) const {
        constexpr int VECS = HEAD_DIM / 4;
        const int many = item.num_items > IN_FLIGHT, lane = threadIdx.x & many;
        for (int base = 0; base < item.num_rows * VECS; base += THREADS >> many) {
            const int i = base + (threadIdx.x >> many);
            const int row = min(i / VECS, item.num_rows - 1), feat = i % VECS * 4;
            State<1, 4> state = merge(row, feat, lane, many);
            if (many) {
                state.add_lane(1);
            }
            if (lane == 0 && i < item.num_rows * VECS && feat < head_dim) {
                visit(state, row, feat);
            }
        }
    }

    // The same for tiles of many rows, most of which have few items: a thread has vectors of
    // ROWS_OF rows on their way together, one item after the other.
    template <int THREADS, typename Visit>
    __device__ __forceinline__ void each_vector_of_many(int head_dim, Visit visit) const {
        constexpr int VECS = HEAD_DIM / 4, ROWS_AT_ONCE = THREADS / VECS, ROWS_OF = 16;
        static_assert(THREADS % VECS == 0, "a thread has one vector of each of its rows");
        const int tid = tid_x(), feat = tid % VECS * 4;
        for (int base = tid / VECS; base < item.num_rows; base += ROWS_OF * ROWS_AT_ONCE) {
            State<1, 4> states[ROWS_OF];
#pragma unroll 1
            for (int i = 0; i < item.num_items; ++i) {
                float2 md[ROWS_OF];
                float4 o[ROWS_OF];
#pragma unroll
                for (int j = 0; j < ROWS_OF; ++j) {
                    const int64_t from =
                        slot_row(i, min(base + j * ROWS_AT_ONCE, item.num_rows - 1));
                    md[j] = __ldcg(reinterpret_cast<const float2*>(work.states + from * 2));
                    o[j] =
                        __ldcg(reinterpret_cast<const float4*>(work.sums + from * HEAD_DIM + feat));
                }
#pragma unroll
                for (int j = 0; j < ROWS_OF; ++j) {
                    const float sums[1][4] = {{o[j].x, o[j].y, o[j].z, o[j].w}};
                    states[j].raise(fmaxf(states[j].m, md[j].x));
                    states[j].add(md[j].x, md[j].y, sums);
                }
            }
#pragma unroll
            for (int j = 0; j < ROWS_OF; ++j) {
                const int row = base + j * ROWS_AT_ONCE;
                if (row < item.num_rows && feat < head_dim) {
                    visit(states[j], row, feat);
                }
            }
        }
    }

    // Four sums of a row over all items of the tile, or from `first` on over every other.
    __device__ __forceinline__ State<1, 4> merge(
        int row, int feat, int first, bool alternate) const {
        State<1, 4> state;
        for (int base = first; base < item.num_items; base += IN_FLIGHT << alternate) {
            float2 md[IN_FLIGHT];
            float4 o[IN_FLIGHT];
            float m = state.m;
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int32_t item_idx = base + (i << alternate);
                md[i] = make_float2(NO_KEY, 0.0f);
                o[i] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
                if (item_idx < item.num_items) {
                    const int64_t from = slot_row(item_idx, row);
                    md[i] = __ldcg(reinterpret_cast<const float2*>(work.states + from * 2));
                    o[i] =
                        __ldcg(reinterpret_cast<const float4*>(work.sums + from * HEAD_DIM + feat));
                }
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                m = fmaxf(m, md[i].x);
            }
            state.raise(m);
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const float sums[1][4] = {{o[i].x, o[i].y, o[i].z, o[i].w}};
                state.add(md[i].x, md[i].y, sums);
            }
        }
        return state;
    }
};

}  // namespace cukv
