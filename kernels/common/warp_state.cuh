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
    // A maximum before there is a key. Not -inf, from which no weight could be told: weights of no
    // keys are 0 without a question asked, and any logit is above it or at it.
    static constexpr float LOWEST = -3.402823466e38f;

    float m[M_TILES][2];
    float d[M_TILES][2];
    float o[M_TILES][FEAT_TILES][4];

    __device__ __forceinline__ explicit WarpState(float m_of_no_key = NO_KEY) : d{}, o{} {
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            m[i / 2][i % 2] = m_of_no_key;
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
        const int t = tid_x() % 4;
#pragma unroll
        for (int tile = 0; tile < FEAT_TILES; tile += 2) {
            float sums[4];
            const int feat = tile * 8 + neighbours<KV>(
                                            sums, &o[m_tile][tile][2 * half_idx],
                                            &o[m_tile][tile + 1][2 * half_idx], t);
            visit(sums, feat);
        }
    }

    // Stores a row's sums times `factor`, as 16-bit numbers, to `to`, if it is not null.
    template <typename KV, typename TO>
    __device__ __forceinline__ void store_row(
        int m_tile, int half_idx, float factor, char* to, int head_dim) const {
        const int t = tid_x() % 4;
#pragma unroll
        for (int tile = 0; tile < FEAT_TILES; tile += 2) {
            uint2 results;
            const int feat = tile * 8 + neighbours<KV, TO>(
                                            results, &o[m_tile][tile][2 * half_idx],
                                            &o[m_tile][tile + 1][2 * half_idx], factor, t);
            if (to != nullptr && feat < head_dim) {
                *reinterpret_cast<uint2*>(to + feat * sizeof(TO)) = results;
            }
        }
    }

    // The largest of this lane's scores of each row.
    template <int TILES>
    static __device__ __forceinline__ void find_largest(
        float (&largest)[M_TILES][2], const float (&s)[M_TILES][TILES][4]) {
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            const int m_tile = i / 2, half_idx = i % 2;
            float& x = largest[m_tile][half_idx];
            x = fmaxf(s[m_tile][0][2 * half_idx], s[m_tile][0][2 * half_idx + 1]);
#pragma unroll
            for (int tile = 1; tile < TILES; ++tile) {
                x = fmaxf(
                    x, fmaxf(s[m_tile][tile][2 * half_idx], s[m_tile][tile][2 * half_idx + 1]));
            }
        }
    }

    // Turns logits, which are the scores times a positive scale, into weights relative to what the
    // row's maximum was when it last rose.
    template <int TILES>
    __device__ __forceinline__ void weigh(
        float (&s)[M_TILES][TILES][4], const float (&largest)[M_TILES][2], float scale) {
        bool is_above = false;
#pragma unroll
        for (int i = 0; i < M_TILES * 2; ++i) {
            const int m_tile = i / 2, half_idx = i % 2;
            is_above |= fmaf(largest[m_tile][half_idx], scale, -m[m_tile][half_idx]) > LAZY;
        }
        if (__any_sync(0xffffffffu, is_above)) {
            raise(largest, scale);
        }
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

    // Raises the maxima of rows that have a logit too far above, given their lanes' largest scores.
    __device__ __forceinline__ void raise(const float (&largest)[M_TILES][2], float scale) {
#pragma unroll
        for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
            float factor[2];
#pragma unroll
            for (int half_idx = 0; half_idx < 2; ++half_idx) {
                float x = largest[m_tile][half_idx];
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
                x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2)) * scale;
                float& m_row = m[m_tile][half_idx];
                const float m_new = x - m_row > LAZY ? x : m_row;
                factor[half_idx] = ex2(m_row - m_new);
                m_row = m_new;
                d[m_tile][half_idx] *= factor[half_idx];
            }
#pragma unroll
            for (int i = 0; i < FEAT_TILES * 4; ++i) {
                o[m_tile][i / 4][i % 4] *= factor[i % 4 / 2];
            }
        }
    }
};

}  // namespace cukv
