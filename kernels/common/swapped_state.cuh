// The online softmax of a warp over its own keys, between products with operands swapped.
//
// `m` of a row is the largest logit up to some step, and no later one is more than SLACK above it: what
// is relative to it stays far below where half ends, and most steps need no exchange between lanes to
// find the largest. Sums may be 2^SLACK times as large as relative to the largest: so values end where
// float32 does, less 2^SLACK and the number of keys. `m` is the same in all lanes of the row; the
// denominator is of each lane's own keys only, because adding up can wait until the state is stored.
#pragma once
#include "common/softmax.cuh"
#include "common/swapped.cuh"

namespace cukv {

template <typename KV, int ROWS, int HEAD_DIM>
struct SwappedState {
    static constexpr int N_TILES = ROWS / 8, FEAT_TILES = HEAD_DIM / 16;
    static constexpr float SLACK = 8.0f;  // in base 2

    float m[N_TILES][2];
    float d[N_TILES][2];
    float o[N_TILES][FEAT_TILES][4];

    __device__ __forceinline__ SwappedState() : d{}, o{} {
#pragma unroll
        for (int i = 0; i < N_TILES * 2; ++i) {
            m[i / 2][i % 2] = NO_KEY;
        }
    }

    // Turns logits into weights relative to the rows' m, which they may raise. What is summed up is
    // the weights as the product takes them, so that equal values come out as they are.
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
            // The difference, because a sum would be rounded; of two -inf it is NaN, and not above.
            above = above || largest[n_tile][e] - m[n_tile][e] > SLACK;
        }
        if (__any_sync(0xffffffffu, above)) {
            raise(largest);
        }
        SwappedWeights<ROWS, TOKENS> weights;
#pragma unroll
        for (int i = 0; i < TOKENS / 16 * N_TILES; ++i) {
            const int tile = i / N_TILES, n_tile = i % N_TILES;
            const float (&x)[4] = s.x[n_tile][tile];
            const float base_0 = base(n_tile, 0), base_1 = base(n_tile, 1);
            const uint32_t low = cvt_pair<Operand<KV>>(ex2(x[0] - base_0), ex2(x[1] - base_1));
            const uint32_t high = cvt_pair<Operand<KV>>(ex2(x[2] - base_0), ex2(x[3] - base_1));
            const float2 of_low = floats_of<Operand<KV>>(low),
                         of_high = floats_of<Operand<KV>>(high);
            d[n_tile][0] += of_low.x + of_high.x;
            d[n_tile][1] += of_low.y + of_high.y;
            weights.pairs[tile][n_tile] = {movmatrix_trans(low), movmatrix_trans(high)};
        }
        return weights;
    }

    // What weights are relative to: those of no keys are 0.
    __device__ __forceinline__ float base(int n_tile, int e) const {
        return m[n_tile][e] > NO_KEY ? m[n_tile][e] : 0.0f;
    }

    // Moves every row's m up to the largest of its lanes.
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
