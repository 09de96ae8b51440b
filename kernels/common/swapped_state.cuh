// The online softmax of a warp over its own keys, between products with operands swapped.
//
// Maximum and denominator of a row are in its eight lanes: the maximum the same in all, the
// denominator of each lane's own keys only, because adding them up can wait until the state is
// stored. Most steps raise no maximum, and then lanes need not exchange theirs.
#pragma once
#include "common/softmax.cuh"
#include "common/swapped.cuh"

namespace cukv {

template <typename KV, int ROWS, int HEAD_DIM>
struct SwappedState {
    static constexpr int N_TILES = ROWS / 8, FEAT_TILES = HEAD_DIM / 16;

    float m[N_TILES][2];
    float d[N_TILES][2];
    float o[N_TILES][FEAT_TILES][4];

    __device__ __forceinline__ SwappedState() : d{}, o{} {
#pragma unroll
        for (int i = 0; i < N_TILES * 2; ++i) {
            m[i / 2][i % 2] = NO_KEY;
        }
    }

    // Turns logits into weights relative to the rows' maxima, which they may raise.
    template <int TOKENS>
    __device__ __forceinline__ SwappedWeights<ROWS, TOKENS> weigh(SwappedScores<ROWS, TOKENS>& s) {
        float largest[N_TILES][2];
        bool above = false;
#pragma unroll
        for (int i = 0; i < N_TILES * 2; ++i) {
            const int n_tile = i / 2, e = i % 2;
            largest[n_tile][e] = NO_KEY;
#pragma unroll
            for (int tile = 0; tile < TOKENS / 16; ++tile) {
                const float* x = s.x[n_tile][tile];
                largest[n_tile][e] = fmaxf(largest[n_tile][e], fmaxf(x[e], x[2 + e]));
            }
            above = above || largest[n_tile][e] > m[n_tile][e];
        }
        if (__any_sync(0xffffffffu, above)) {
            raise(largest);
        }
        SwappedWeights<ROWS, TOKENS> weights;
#pragma unroll
        for (int i = 0; i < TOKENS / 16 * N_TILES; ++i) {
            const int tile = i / N_TILES, n_tile = i % N_TILES;
            const float (&x)[4] = s.x[n_tile][tile];
            float w[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                w[k] = ex2(x[k] - base(n_tile, k % 2));
            }
            d[n_tile][0] += w[0] + w[2];
            d[n_tile][1] += w[1] + w[3];
            const uint32_t low = cvt_pair<Operand<KV>>(w[0], w[1]);
            const uint32_t high = cvt_pair<Operand<KV>>(w[2], w[3]);
            weights.pairs[tile][n_tile] = {movmatrix_trans(low), movmatrix_trans(high)};
        }
        return weights;
    }

    // What weights are relative to: those of no keys are 0.
    __device__ __forceinline__ float base(int n_tile, int e) const {
        return m[n_tile][e] > NO_KEY ? m[n_tile][e] : 0.0f;
    }

    // Moves every row's maximum up to the largest of its lanes.
    __device__ __forceinline__ void raise(const float (&largest)[N_TILES][2]) {
#pragma unroll
        for (int i = 0; i < N_TILES * 2; ++i) {
            const int n_tile = i / 2, e = i % 2;
            float m_new = fmaxf(m[n_tile][e], largest[n_tile][e]);
            m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffffu, m_new, 4));
            m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffffu, m_new, 8));
            m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffffu, m_new, 16));
            const float m_old = m[n_tile][e];
            m[n_tile][e] = m_new;
            const float factor = ex2(m_old - base(n_tile, e));
            d[n_tile][e] *= factor;
#pragma unroll
            for (int tile = 0; tile < FEAT_TILES; ++tile) {
                o[n_tile][tile][e] *= factor;
                o[n_tile][tile][2 + e] *= factor;
            }
        }
    }
};

}  // namespace cukv
