// The states of a CTA's warps, each over keys of its own, as one.
#pragma once
#include "common/swapped_state.cuh"

namespace cukv {

// States of the warps of a CTA in shared memory, all of the same rows. The padding of a row puts
// the rows that a warp stores together on different banks.
template <int WARPS, int ROWS, int HEAD_DIM>
struct WarpStates {
    float o[WARPS][ROWS][HEAD_DIM + 4];
    float m[WARPS][ROWS];
    float d[WARPS][ROWS];

    // By all warps, each its own: the `order`-th in the order of the keys' steps.
    template <typename KV>
    __device__ __forceinline__ void store(const SwappedState<KV, ROWS, HEAD_DIM>& warp, int order) {
        const int g = threadIdx.x % WARP_SIZE / 4;
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) {
            const int n_tile = i / 2, e = i % 2, row = swapped_row(n_tile, e);
            float sum = warp.d[n_tile][e];
            sum += __shfl_xor_sync(0xffffffffu, sum, 4);
            sum += __shfl_xor_sync(0xffffffffu, sum, 8);
            sum += __shfl_xor_sync(0xffffffffu, sum, 16);
            if (g == 0) {
                m[order][row] = warp.m[n_tile][e];
                d[order][row] = sum;
            }
#pragma unroll
            for (int tile = 0; tile < HEAD_DIM / 16; ++tile) {
                const float (&x)[4] = warp.o[n_tile][tile];
                float* to = o[order][row] + tile * 16;
                if constexpr (is_fp8<KV>) {
                    *reinterpret_cast<float2*>(to + 2 * g) = make_float2(x[e], x[2 + e]);
                } else {
                    to[g] = x[e];
                    to[8 + g] = x[2 + e];
                }
            }
        }
    }

    // Four sums of a row over all warps, in the order of the keys' steps.
    __device__ __forceinline__ State<1, 4> merge(int row, int feat) const {
        float m_of[WARPS];
        State<1, 4> state;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            m_of[i] = m[i][row];
            state.m = fmaxf(state.m, m_of[i]);
        }
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const float4 x = *reinterpret_cast<const float4*>(&o[i][row][feat]);
            const float sums[1][4] = {{x.x, x.y, x.z, x.w}};
            state.add(m_of[i], d[i][row], sums);
        }
        return state;
    }
};

}  // namespace cukv
