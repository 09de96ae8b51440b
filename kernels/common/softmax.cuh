// The state of an online softmax, and how states over disjoint keys become one. Every kernel that
// splits keys merges with this.
//
//   m = max_j s[j],  d = sum_j 2^(s[j] - m),  o = sum_j 2^(s[j] - m) * v[j]     (s in base 2)
//   attention output = o / d,  lse = m + log2(d)
#pragma once
#include "common/ptx.cuh"

namespace cukv {

constexpr float NO_KEY = __builtin_bit_cast(float, 0xff800000u);  // maximum of no keys: -inf

// What a thread holds of a head: running maximum, denominator, and VECS vectors of weighted sums.
// Sums start as -0.0, and states that are not live add -0.0, which changes no float: one live
// state comes out bit for bit.
template <int VECS, int VEC>
struct State {
    float m = NO_KEY;
    float d = 0.0f;
    float o[VECS][VEC];

    __device__ __forceinline__ State() {
#pragma unroll
        for (int vec = 0; vec < VECS; ++vec) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                o[vec][i] = -0.0f;
            }
        }
    }

    // Weights are relative to the maximum. Without a live state they are all 0.
    __device__ __forceinline__ float weight(float m_other) const {
        return ex2(m_other - (m > NO_KEY ? m : 0.0f));
    }

    // Moves the maximum up to m_new.
    __device__ __forceinline__ void raise(float m_new) {
        const float m_old = m;
        m = m_new;
        const float scale = weight(m_old);
        d *= scale;
#pragma unroll
        for (int vec = 0; vec < VECS; ++vec) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                o[vec][i] *= scale;
            }
        }
    }

    // Adds a state whose maximum is not above this one's.
    __device__ __forceinline__ void add(
        float m_other, float d_other, const float (&o_other)[VECS][VEC]) {
        const float w = weight(m_other);
        d = fmaf(w, d_other, d);
#pragma unroll
        for (int vec = 0; vec < VECS; ++vec) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                o[vec][i] = fmaf(w, o_other[vec][i], o[vec][i]);
            }
        }
    }

    // Adds the state of the lane whose number differs by `distance` in one bit.
    __device__ __forceinline__ void add_lane(int distance) {
        const float m_other = __shfl_xor_sync(0xffffffffu, m, distance);
        const float d_other = __shfl_xor_sync(0xffffffffu, d, distance);
        float o_other[VECS][VEC];
#pragma unroll
        for (int vec = 0; vec < VECS; ++vec) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                o_other[vec][i] = __shfl_xor_sync(0xffffffffu, o[vec][i], distance);
            }
        }
        raise(fmaxf(m, m_other));
        add(m_other, d_other, o_other);
    }

    // The finished vector times `factor`; +0.0 without a live state.
    template <typename TO>
    __device__ __forceinline__ Vec<TO, VEC> result(int vec, float factor = 1.0f) const {
        const float scale = factor / d;
        Vec<TO, VEC> y;
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            y[i] = from_float<TO>(d > 0.0f ? o[vec][i] * scale : 0.0f);
        }
        return y;
    }

    __device__ __forceinline__ float lse() const { return m + log2f(d); }
};

}  // namespace cukv
