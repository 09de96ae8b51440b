// The online softmax of a warp over its own keys, and the states of a CTA's warps as one.
//
// Sums lie in lanes as common/products.cuh says; maximum and denominator of a row are in its four
// lanes: the maximum the same in all, the denominator of each lane's own keys only, because adding
// them up can wait until the state is stored.
#pragma once
#include "common/products.cuh"

namespace cukv {

template <int M_TILES, int HALVES, int FEAT_TILES>
struct WarpState {
    float m[M_TILES][HALVES];
    float d[M_TILES][HALVES];
    float o[M_TILES][FEAT_TILES][2 * HALVES];

    __device__ __forceinline__ WarpState() : d{}, o{} {
#pragma unroll
        for (int i = 0; i < M_TILES * HALVES; ++i) {
            m[i / HALVES][i % HALVES] = NO_KEY;
        }
    }

    // The denominator of a row over all its lanes.
    __device__ __forceinline__ float whole_d(int m_tile, int half_idx) const {
        float sum = d[m_tile][half_idx];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        return sum;
    }

    // Calls visit(sums, feat) for vectors of four neighbouring sums of a row that cover it once over
    // its four lanes.
    template <typename KV, typename Visit>
    __device__ __forceinline__ void each_vector(int m_tile, int half_idx, Visit visit) const {
#pragma unroll
        for (int tile = 0; tile < FEAT_TILES; tile += 2) {
            float sums[4];
            const int feat = tile * 8 + neighbours<KV>(
                                            sums, &o[m_tile][tile][2 * half_idx],
                                            &o[m_tile][tile + 1][2 * half_idx]);
            visit(sums, feat);
        }
    }

    // Turns logits into weights relative to the row's maximum, which they may raise.
    template <int TILES>
    __device__ __forceinline__ void weigh(float (&s)[M_TILES][TILES][2 * HALVES]) {
#pragma unroll
        for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
            float factor[HALVES];
#pragma unroll
            for (int half_idx = 0; half_idx < HALVES; ++half_idx) {
                factor[half_idx] = weigh_row(s[m_tile], m_tile, half_idx);
            }
            // Most steps raise no maximum, and then nothing falls behind.
            bool behind = factor[0] != 1.0f;
            behind = behind || factor[HALVES - 1] != 1.0f;
            if (!__any_sync(0xffffffffu, behind)) {
                continue;
            }
#pragma unroll
            for (int i = 0; i < FEAT_TILES * 2 * HALVES; ++i) {
                const int tile = i / (2 * HALVES), column = i % (2 * HALVES);
                o[m_tile][tile][column] *= factor[column / 2];
            }
        }
    }

    // The same of one row; gives the factor by which its sums fall behind.
    template <int TILES>
    __device__ __forceinline__ float weigh_row(
        float (&s)[TILES][2 * HALVES], int m_tile, int half_idx) {
        float m_new = m[m_tile][half_idx];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            m_new = fmaxf(m_new, fmaxf(s[tile][2 * half_idx], s[tile][2 * half_idx + 1]));
        }
        m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffffu, m_new, 1));
        m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffffu, m_new, 2));
        const float base = m_new > NO_KEY ? m_new : 0.0f;  // weights of no keys are 0
        const float factor = ex2(m[m_tile][half_idx] - base);
        float sum = 0.0f;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            float* pair = &s[tile][2 * half_idx];
            pair[0] = ex2(pair[0] - base);
            pair[1] = ex2(pair[1] - base);
            sum += pair[0] + pair[1];
        }
        m[m_tile][half_idx] = m_new;
        d[m_tile][half_idx] = d[m_tile][half_idx] * factor + sum;
        return factor;
    }
};

// States of the warps of a CTA in shared memory, all of the same rows. The padding of a row puts
// the rows that a warp stores together on different banks.
template <int WARPS, int ROWS, int HEAD_DIM>
struct WarpStates {
    float o[WARPS][ROWS][HEAD_DIM + 8];
    float m[WARPS][ROWS];
    float d[WARPS][ROWS];

    // By all warps, each its own.
    template <typename KV, int M_TILES, int HALVES, int FEAT_TILES>
    __device__ __forceinline__ void store(const WarpState<M_TILES, HALVES, FEAT_TILES>& warp) {
        const int warp_idx = threadIdx.x / WARP_SIZE;
#pragma unroll
        for (int i = 0; i < M_TILES * HALVES; ++i) {
            const int m_tile = i / HALVES, half_idx = i % HALVES;
            const int row = lane_row(m_tile, half_idx);
            const float sum = warp.whole_d(m_tile, half_idx);
            if (threadIdx.x % 4 == 0) {
                m[warp_idx][row] = warp.m[m_tile][half_idx];
                d[warp_idx][row] = sum;
            }
#pragma unroll
            for (int tile = 0; tile < FEAT_TILES; tile += 2) {
                const float* even = &warp.o[m_tile][tile][2 * half_idx];
                const float* odd = &warp.o[m_tile][tile + 1][2 * half_idx];
                store_tile_pair<KV>(&o[warp_idx][row][tile * 8], even, odd);
            }
        }
    }

    // Four sums of a row over all warps, from first_warp on, which is the order of the keys' steps.
    __device__ __forceinline__ State<1, 4> merge(int row, int feat, int first_warp) const {
        float m_of[WARPS];
        State<1, 4> state;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            m_of[i] = m[(first_warp + i) % WARPS][row];
            state.m = fmaxf(state.m, m_of[i]);
        }
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const int warp_idx = (first_warp + i) % WARPS;
            const float4 x = *reinterpret_cast<const float4*>(&o[warp_idx][row][feat]);
            const float sums[1][4] = {{x.x, x.y, x.z, x.w}};
            state.add(m_of[i], d[warp_idx][row], sums);
        }
        return state;
    }
};

}  // namespace cukv
