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

    // Moves maxima up to those of logits, which are the scores times a positive scale; sums fall
    // behind.
    template <int TILES>
    __device__ __forceinline__ void raise(const float (&s)[M_TILES][TILES][4], float scale) {
        float factors[M_TILES][2];
        bool any_falls = false;
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            const int m_tile = i / 2, half_idx = i % 2;
            const float m_old = m[m_tile][half_idx];
            m[m_tile][half_idx] = fmaxf(m_old, scale * largest(s[m_tile], half_idx));
            const float factor = ex2(m_old - m[m_tile][half_idx]);
            d[m_tile][half_idx] *= factor;
            factors[m_tile][half_idx] = factor;
            any_falls |= factor != 1.0f;
        }
        // Most steps raise no maximum, and then nothing falls behind.
        if (__any_sync(0xffffffffu, any_falls)) {
#pragma unroll
            for (int i = 0; i < M_TILES * FEAT_TILES * 4; ++i) {
                const int m_tile = i / (FEAT_TILES * 4), tile = i / 4 % FEAT_TILES, k = i % 4;
                o[m_tile][tile][k] *= factors[m_tile][k / 2];
            }
        }
    }

    // Of a row's scores, in all its lanes.
    template <int TILES>
    static __device__ __forceinline__ float largest(const float (&s)[TILES][4], int half_idx) {
        float x = NO_KEY;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            x = fmaxf(x, fmaxf(s[tile][2 * half_idx], s[tile][2 * half_idx + 1]));
        }
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    }

    // Turns scores into weights, once maxima are raised.
    template <int TILES>
    __device__ __forceinline__ void weigh(float (&s)[M_TILES][TILES][4], float scale) {
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            const int m_tile = i / 2, half_idx = i % 2;
            float sum = 0.0f;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                float* pair = &s[m_tile][tile][2 * half_idx];
                pair[0] = ex2(fmaf(pair[0], scale, -m[m_tile][half_idx]));
                pair[1] = ex2(fmaf(pair[1], scale, -m[m_tile][half_idx]));
                sum += pair[0] + pair[1];
            }
            d[m_tile][half_idx] += sum;
        }
    }
};

}  // namespace cukv
