// The online softmax of a warp over its own keys.
//
// Sums lie in lanes as common/products.cuh says; maximum and denominator of a row are in its four
// lanes: the maximum the same in all, the denominator of each lane's own keys only, because adding
// them up can wait until the state is stored.
#pragma once
#include "common/products.cuh"

namespace cukv {

template <int M_TILES, int FEAT_TILES>
struct WarpState {
    // Until there is a key. Not -inf, from which no weight could be told: now those of no keys are 0
    // without a question asked, and any logit is above it or at it. Outside it is NO_KEY.
    static constexpr float LOWEST = -3.402823466e38f;

    float m[M_TILES][2];
    float d[M_TILES][2];
    float o[M_TILES][FEAT_TILES][4];

    __device__ __forceinline__ WarpState() : d{}, o{} {
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            m[i / 2][i % 2] = LOWEST;
        }
    }

    // The maximum of a row whose denominator is d.
    __device__ __forceinline__ float maximum(int m_tile, int half_idx, float d) const {
        return d > 0.0f ? m[m_tile][half_idx] : NO_KEY;
    }

    // The denominator of a row over all its lanes.
    __device__ __forceinline__ float whole_d(int m_tile, int half_idx) const {
        float sum = d[m_tile][half_idx];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        return sum;
    }

    // Calls visit(sums, feat) for vectors of four neighbouring sums of a row that cover it once
    // over its four lanes.
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

    // Turns logits, which are the scores times a positive scale, into weights relative to the row's
    // maximum, which they may raise.
    template <int TILES>
    __device__ __forceinline__ void weigh(float (&s)[M_TILES][TILES][4], float scale) {
#pragma unroll
        for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
            float factor[2];
#pragma unroll
            for (int half_idx = 0; half_idx < 2; ++half_idx) {
                factor[half_idx] = weigh_row(s[m_tile], m_tile, half_idx, scale);
            }
            // Most steps raise no maximum, and then nothing falls behind.
            if (!__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
                continue;
            }
#pragma unroll
            for (int i = 0; i < FEAT_TILES * 4; ++i) {
                o[m_tile][i / 4][i % 4] *= factor[i % 4 / 2];
            }
        }
    }

    // The same of one row; gives the factor by which its sums fall behind.
    template <int TILES>
    __device__ __forceinline__ float weigh_row(
        float (&s)[TILES][4], int m_tile, int half_idx, float scale) {
        float m_new = NO_KEY;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            m_new = fmaxf(m_new, fmaxf(s[tile][2 * half_idx], s[tile][2 * half_idx + 1]));
        }
        m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffffu, m_new, 1));
        m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffffu, m_new, 2));
        m_new = fmaxf(m[m_tile][half_idx], m_new * scale);
        const float factor = ex2(m[m_tile][half_idx] - m_new);
        float sum = 0.0f;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            float* pair = &s[tile][2 * half_idx];
            pair[0] = ex2(fmaf(pair[0], scale, -m_new));
            pair[1] = ex2(fmaf(pair[1], scale, -m_new));
            sum += pair[0] + pair[1];
        }
        m[m_tile][half_idx] = m_new;
        d[m_tile][half_idx] = d[m_tile][half_idx] * factor + sum;
        return factor;
    }
};

}  // namespace cukv
