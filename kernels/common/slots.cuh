// States of a tile of several items, in global memory until the last item's CTA merges them.
//
// A slot is the state of one item and KV head: [rows, 2] maximum and denominator, and
// [rows, head_dim] sums. A tile's slots are merged in the order of its keys, so that a result does not
// depend on which CTA comes last.
#pragma once
#include "common/softmax.cuh"
#include "common/work.cuh"

namespace cukv {

template <int ROWS, int HEAD_DIM>
struct Slots {
    static constexpr int IN_FLIGHT = 16;  // states whose loads a thread starts together

    const WorkList& work;
    const Item& item;
    int kv_head;

    // Of a row of the tile's i-th item, among all rows of all slots.
    __device__ __forceinline__ int64_t slot_row(int32_t i, int row) const {
        return (int64_t{item.slot(i)} * work.num_kv_heads + kv_head) * ROWS + row;
    }

    __device__ __forceinline__ void store(const State<1, 4>& state, int row, int feat) const {
        const int64_t to = slot_row(item.item_idx, row);
        *reinterpret_cast<float4*>(work.sums + to * HEAD_DIM + feat) =
            make_float4(state.o[0][0], state.o[0][1], state.o[0][2], state.o[0][3]);
        if (feat == 0) {
            *reinterpret_cast<float2*>(work.states + to * 2) = make_float2(state.m, state.d);
        }
    }

    // Whether this CTA is the last of the tile's: then all its slots are written. `last` is shared.
    __device__ __forceinline__ bool takes_last_ticket(int32_t& last) const {
        __syncthreads();  // the slot is written; thread 0 publishes it for all
        if (threadIdx.x == 0) {
            int32_t* ticket = work.tickets + int64_t{item.first_slot} * work.num_kv_heads + kv_head;
            __threadfence();
            last = atomicAdd(ticket, 1) == item.num_items - 1;
            __threadfence();
            if (last) {
                *ticket = 0;  // for the next launch
            }
        }
        __syncthreads();  // `last` is there
        return last;
    }

    // Four sums of a row over all items of the tile.
    __device__ __forceinline__ State<1, 4> merge(int row, int feat) const {
        State<1, 4> state;
        for (int base = 0; base < item.num_items; base += IN_FLIGHT) {
            float2 md[IN_FLIGHT];
            float4 o[IN_FLIGHT];
            float m = state.m;
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int64_t from = slot_row(min(base + i, item.num_items - 1), row);
                md[i] = __ldcg(reinterpret_cast<const float2*>(work.states + from * 2));
                o[i] = __ldcg(reinterpret_cast<const float4*>(work.sums + from * HEAD_DIM + feat));
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                m = fmaxf(m, md[i].x);
            }
            state.raise(m);
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                if (base + i < item.num_items) {
                    const float sums[1][4] = {{o[i].x, o[i].y, o[i].z, o[i].w}};
                    state.add(md[i].x, md[i].y, sums);
                }
            }
        }
        return state;
    }
};

}  // namespace cukv
