// How items end whose rows are dealt to warps: as results, or as states in slots of tiles that are
// cut into several items, which are merged.
#pragma once
#include "common/attention.cuh"
#include "common/slots.cuh"
#include "common/warp_state.cuh"

namespace cukv {

template <typename KV, int HEAD_DIM_VO, int WARP_ROWS, int WARPS, typename Params>
struct WarpResults {
    static constexpr int THREADS = WARPS * WARP_SIZE, ROWS = WARPS * WARP_ROWS;
    static constexpr int M_TILES = WARP_ROWS / 16;
    using Warp = WarpState<M_TILES, HEAD_DIM_VO / 8>;

    // The part of an item that is this warp's: some of its rows.
    static __device__ __forceinline__ Item own_rows(Item item) {
        const int first = tid_x() / WARP_SIZE * WARP_ROWS;
        item.first_row += first;
        item.num_rows = min(max(item.num_rows - first, 0), WARP_ROWS);
        return item;
    }

    // Leaves the state of this warp's rows in the item's slot.
    static __device__ __forceinline__ void leave_rows(
        const Params& p, const Item& item, int kv_head, const Warp& warp) {
        const Slots<ROWS, HEAD_DIM_VO> slots{p.work, item, kv_head};
        const int warp_first = tid_x() / WARP_SIZE * WARP_ROWS;
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            const int m_tile = i / 2, half_idx = i % 2;
            const int row = warp_first + lane_row(m_tile, half_idx);
            const float d = warp.whole_d(m_tile, half_idx);
            if (row < item.num_rows && tid_x() % 4 == 0) {
                slots.store_state(warp.maximum(m_tile, half_idx, d), d, row);
            }
            float* const to = slots.sums_of_row(row);
            warp.template each_vector<KV>(m_tile, half_idx, [&](const float (&sums)[4], int feat) {
                if (row < item.num_rows && feat < p.head_dim_vo) {
                    slots.store_sums(sums, to + feat);
                }
            });
        }
    }

    // Finishes this warp's rows of an item that is all of its tile. TO: 16-bit results, four of
    // which are stored at a time, or float: any, and any way.
    template <typename TO>
    static __device__ __forceinline__ void finish_rows(
        const Params& p, const Item& own, int kv_head, const Warp& warp) {
        if (own.num_rows == 0) {
            return;
        }
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            const int m_tile = i / 2, half_idx = i % 2;
            const int row = lane_row(m_tile, half_idx);
            // Where a row behind them is in o is not looked up: there may be no such row.
            const PackedRow at(p.group, own, kv_head, min(row, own.num_rows - 1));
            const float d = warp.whole_d(m_tile, half_idx);
            const RowResult<Params> result(p, at, warp.maximum(m_tile, half_idx, d), d);
            if (row < own.num_rows && tid_x() % 4 == 0) {
                result.store_lse();
            }
            if constexpr (!is_same<TO, float>) {
                char* to = row < own.num_rows ? result.row() : nullptr;
                warp.template store_row<KV, TO>(m_tile, half_idx, result.factor, to, p.head_dim_vo);
            } else {
                warp.template each_vector<KV>(
                    m_tile, half_idx, [&](const float (&sums)[4], int feat) {
                        if (row < own.num_rows && feat < p.head_dim_vo) {
                            result.store(sums, feat);
                        }
                    });
            }
        }
    }

    // Finishes an item; those of a tile with several are merged by whoever leaves the last of them.
    // `last` is in shared memory, for whether this CTA has the last ticket.
    static __device__ __forceinline__ void finish(
        const Params& p, const Item& item, int kv_head, const Warp& warp, int32_t& last) {
        const int64_t split_row = item.first_slot < 0 ? 0 : p.levels.split_row(item);
        if (split_row >= 0) {
            Item own = own_rows(item);
            own.first_q_row += split_row;
            if (p.o_rows.aligned && p.o_rows.kind == KIND_BFLOAT16) {
                finish_rows<bfloat16>(p, own, kv_head, warp);
            } else if (p.o_rows.aligned && p.o_rows.kind == KIND_HALF) {
                finish_rows<half>(p, own, kv_head, warp);
            } else {
                finish_rows<float>(p, own, kv_head, warp);
            }
            return;
        }
        leave_rows(p, item, kv_head, warp);
        const Slots<ROWS, HEAD_DIM_VO> slots{p.work, item, kv_head};
        if (item.num_rows == 0 || !slots.takes_last_ticket(last)) {
            return;
        }
        slots.template each_vector_of_many<THREADS>(
            p.head_dim_vo, [&](const State<1, 4>& state, int row, int feat) {
                const PackedRow at(p.group, item, kv_head, row);
                const RowResult<Params> result(p, at, state.m, state.d);
                result.store(state.o[0], feat);
                if (feat == 0) {
                    result.store_lse();
                }
            });
    }
};

}  // namespace cukv
