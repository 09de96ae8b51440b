// What the rows of a team come to: results, or states of one of several items of a tile.
//
// Results of a whole tile go out through the memory of its queries, which others take from there
// (common/row_server.cuh). Cta: Results, the tile; State, TEAM_ROWS, is_staged, Order, Smem.
// Params: those of common/attention.cuh.
#pragma once
#include "common/operand_tiles.cuh"
#include "common/team_slots.cuh"
#include "common/warpgroup_state.cuh"

namespace cukv {

template <typename KV, typename Cta, typename Params>
struct TeamResults {
    using Sums = decltype(Cta::State::o);

    const Params& p;
    typename Cta::Smem& smem;
    const int team, warp_idx;
    const int row;  // of the tile, the first of this lane's two; the other is 8 below
    float scale;    // of maxima, to base 2
    float v_scale;

    // Rows of an item whose last sums are still to come, or to be finished: what they are to be
    // multiplied by, and of an item that is not staged also maximum and denominator.
    struct Ended {
        float factor[2], m[2], d[2];
    };

    // Ends an item's rows.
    __device__ __forceinline__ Ended conclude(int slot, const RowStates& states) const {
        const typename Cta::Order& order = smem.orders[slot][team];
        Ended rows;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            rows.factor[h] = states.behind[h];
            rows.m[h] = states.m[h] * scale;
            rows.d[h] = states.d[h] + __shfl_xor_sync(0xffffffffu, states.d[h], 1);
            rows.d[h] += __shfl_xor_sync(0xffffffffu, rows.d[h], 2);
        }
        if (!Cta::is_staged(p, order.item)) {
            return rows;
        }
        if (p.sinks != nullptr) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const PackedRow at(p.group, order.item, order.kv_head, row + 8 * h);
                rows.factor[h] *= add_sink(p, at.qo_head, rows.m[h], rows.d[h]);
            }
        }
        if (p.lse != nullptr && threadIdx.x % 4 == 0) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (row + 8 * h < order.item.num_rows) {
                    const PackedRow at(p.group, order.item, order.kv_head, row + 8 * h);
                    *reinterpret_cast<float*>(p.lse + p.lse_rows.offset(at)) =
                        rows.m[h] + __log2f(rows.d[h]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            rows.factor[h] =
                rows.d[h] > 0.0f ? __fdividef(rows.factor[h] * v_scale, rows.d[h]) : 0.0f;
        }
        return rows;
    }

    // What an item came to goes out through the memory of its queries, if it is all of its tile;
    // else the last item of a tile merges all, and stores them.
    __device__ __forceinline__ void finish(int slot, Ended& rows, Sums& o) const {
        const typename Cta::Order& order = smem.orders[slot][team];
        if (Cta::is_staged(p, order.item)) {
            stage(slot, rows.factor, o);
        } else {
            merge_and_store(order, rows, o);
        }
        mbarrier_arrive(smem.o_full[slot][team]);
    }

    __device__ __forceinline__ void stage(int slot, const float (&factor)[2], const Sums& o) const {
        const uint32_t tile = smem_address(smem.q[slot][team]);
        const int tile_row = warp_idx % 4 * 16 + threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < Cta::State::O_VALUES / 8; ++i) {
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // adding 0 makes the results of a row without keys +0
                const float* pair = &o[2 * i + j / 2][j % 2 * 2];
                x[j] = cvt_pair<KV>(
                    fmaf(pair[0], factor[j % 2], 0.0f), fmaf(pair[1], factor[j % 2], 0.0f));
            }
            stmatrix_x4(
                tile + Cta::Results::offset(tile_row, 2 * i + threadIdx.x % WARP_SIZE / 16), x);
        }
        fence_proxy_async();
    }

    // Rows of one of several items, or results of a dtype or at strides that no vector has.
    __device__ __forceinline__ void merge_and_store(
        const typename Cta::Order& order, Ended& rows, Sums& o) const {
        const Item& item = order.item;
#pragma unroll
        for (int i = 0; i < Cta::State::O_VALUES; ++i) {
            o[i / 4][i % 4] *= rows.factor[i % 4 / 2];
        }
        if (item.first_slot >= 0) {
            const TeamSlots<Cta::ROWS, Cta::State::O_VALUES * 2> slots{
                p.work, item, order.kv_head, team, row};
            slots.store(o, rows.m, rows.d);
            if (!slots.takes_last_ticket(smem.last[team])) {
                return;
            }
            slots.merge(o, rows.m, rows.d);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at_row = row + 8 * h;
            const RowResult<Params> result(
                p, PackedRow(p.group, item, order.kv_head, at_row), rows.m[h], rows.d[h]);
            if (at_row < item.num_rows && threadIdx.x % 4 == 0) {
                result.store_lse();
            }
#pragma unroll
            for (int tile = 0; tile < Cta::State::O_VALUES / 4; tile += 2) {
                float sums[4];
                const int feat =
                    tile * 8 + neighbours<KV>(sums, &o[tile][2 * h], &o[tile + 1][2 * h]);
                if (at_row < item.num_rows && feat < p.head_dim_vo) {
                    result.store(sums, feat);
                }
            }
        }
    }
};

}  // namespace cukv
