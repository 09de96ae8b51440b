// Finished rows of a team (common/team.cuh): to memory, or to where its queries were, from where
// they are copied out.
#pragma once
#include "common/operands.cuh"
#include "common/ptx_sm90.cuh"
#include "common/queries.cuh"
#include "common/warpgroup_state.cuh"

namespace cukv {

template <typename KV, typename Cta, typename Params>
struct TeamResults {
    const Params& p;
    typename Cta::Smem& smem;
    const typename Cta::State& state;
    const int team, warp_idx, lane_idx;
    const int row;  // of the tile, the first of this lane's two; the other is 8 below

    // Stores finished rows, so many rows behind their own; true: as results in the memory of their
    // queries.
    __device__ __forceinline__ bool store(
        int slot, const float (&m)[2], const float (&d)[2], int64_t rows_behind) const {
        constexpr int KIND = is_same<KV, half> ? KIND_HALF : KIND_BFLOAT16;
        const typename Cta::Order& order = smem.orders[slot][team];
        // Results of fp8 have either of the two kinds of 16 bits, which are the first.
        static_assert(KIND_HALF == 0 && KIND_BFLOAT16 == 1, "kinds of 16 bits are the first");
        const bool staged = (is_fp8<KV> ? p.o_rows.kind <= KIND_BFLOAT16 : p.o_rows.kind == KIND) &&
                            p.o_rows.aligned;
        const float v_scale = p.v_scale.get();
        float factor[2] = {output_factor(v_scale, d[0]), output_factor(v_scale, d[1])};
        // Where a row is in q and o takes longer to find out than all else here.
        const bool finds_rows = !staged || p.sinks != nullptr || p.lse != nullptr;
#pragma unroll
        for (int h = 0; h < 2 && finds_rows; ++h) {
            const int at_row = row + 8 * h;
            PackedRow at(p.group, order.item, order.kv_head, at_row);
            at.q_row += rows_behind;
            RowResult<Params> result(p, at, m[h], d[h]);
            factor[h] = result.factor;
            if (at_row < order.item.num_rows && lane_idx % 4 == 0) {
                result.store_lse();
            }
            if (!is_fp8<KV> && p.o_rows.kind == KIND_FLOAT && p.o_rows.aligned) {
                store_floats(result, at_row < order.item.num_rows, h);
            } else if (!staged) {
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
            if constexpr (is_fp8<KV>) {
                stage_neighbours(slot, factor);
            } else {
                stage(slot, factor);
            }
        }
        return staged;
    }

    // Puts results where the rows' queries were.
    __device__ __forceinline__ void stage(int slot, const float (&factor)[2]) const {
        const uint32_t tile = smem_address(smem.q[slot][team]);
        const int tile_row = warp_idx % 4 * 16 + lane_idx % 16;
#pragma unroll
        for (int i = 0; i < Cta::State::O_VALUES / 8; ++i) {
            uint32_t x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                // Adding 0 makes the results of a row without keys +0.
                const float* pair = &state.o[2 * i + j / 2][j % 2 * 2];
                x[j] = cvt_pair<KV>(
                    fmaf(pair[0], factor[j % 2], 0.0f), fmaf(pair[1], factor[j % 2], 0.0f));
            }
            stmatrix_x4(tile + Cta::Results::offset(tile_row, 2 * i + lane_idx / 16), x);
        }
    }

    // Puts results where the rows' queries were, of sums whose tiles have every other feature, as
    // common/fp8_values.cuh lays values out.
    __device__ __forceinline__ void stage_neighbours(int slot, const float (&factor)[2]) const {
        const bool halves = p.o_rows.kind == KIND_HALF;
#pragma unroll
        for (int i = 0; i < Cta::State::O_VALUES / 4; ++i) {
            const int h = i % 2, tile = i / 2 * 2;
            const float *even = &state.o[tile][2 * h], *odd = &state.o[tile + 1][2 * h];
            uint2 x;
            const int feat = halves
                                 ? neighbours<KV, half>(x, even, odd, factor[h], lane_idx % 4)
                                 : neighbours<KV, bfloat16>(x, even, odd, factor[h], lane_idx % 4);
            const int tile_row = warp_idx % 4 * 16 + lane_idx / 4 + 8 * h;
            char* to = smem.q[slot][team] + Cta::Results::offset(tile_row, tile + feat / 8);
            *reinterpret_cast<uint2*>(to + feat % 8 * 2) = x;
        }
    }

    // Stores a row's sums as they lie in its lanes, whose pairs are whole sectors together. The
    // code is short: most CTAs of a cascade come here once, and would wait for every line of it.
    __device__ __forceinline__ void store_floats(
        const RowResult<Params>& result, bool has_row, int half_idx) const {
        if (!has_row || result.at.q_row < 0) {
            return;
        }
        float* to = reinterpret_cast<float*>(p.o + p.o_rows.offset(result.at)) + lane_idx % 4 * 2;
#pragma unroll
        for (int tile = 0; tile < Cta::State::O_VALUES / 4; ++tile) {
            const float* pair = &state.o[tile][2 * half_idx];
            if (tile * 8 < p.head_dim_vo) {
                *reinterpret_cast<float2*>(to + tile * 8) = make_float2(
                    fmaf(pair[0], result.factor, 0.0f), fmaf(pair[1], result.factor, 0.0f));
            }
        }
    }
};

}  // namespace cukv
