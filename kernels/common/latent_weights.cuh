// What a thread of Hopper's kernel over latent rows makes weights of: its scores of two rows, and
// what the rows' weights are relative to.
#pragma once
#include "common/softmax.cuh"

namespace cukv {

// s[i] is of row i / 2 % 2, whose other scores of a tile's 64 keys are with the lane's three
// neighbours.
struct LatentWeights {
    const float unit;  // what is left of the scale of scores for `weigh` to do
    float s[32];
    float m[2];  // what weights are relative to, as a power of two; NO_KEY before the first key
    float d[2], factor[2];

    // `scale` of scores to base 2; one that is not positive is applied before.
    explicit __device__ __forceinline__ LatentWeights(float scale)
        : unit(scale > 0.0f ? scale : 1.0f) {}

    __device__ __forceinline__ void apply(float scale) {
        if (scale <= 0.0f) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                s[i] *= scale;
            }
        }
    }

    // Scores with ckv become those with all of a key; `scales` are the two rows', of ckv and kpe.
    __device__ __forceinline__ void join(const float (&s_pe)[32], const float2 (&scales)[2]) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const float2 of_row = scales[i / 2 % 2];
            s[i] = fmaf(s[i], of_row.x, s_pe[i] * of_row.y);
        }
    }

    // Exponent of the weight 1; weights of no keys are 0.
    static __device__ __forceinline__ float base(float m) { return m > NO_KEY ? m : 0.0f; }

    // Turns scores into weights relative to what the rows' maxima were when they last rose. Whether
    // they rise takes a vote; lanes tell each other their scores' maxima only if one does.
    __device__ __forceinline__ void weigh() {
        float most[2];
        bool rises = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            most[h] = NO_KEY;
#pragma unroll
            for (int i = 2 * h; i < 32; i += 4) {
                most[h] = fmaxf(most[h], fmaxf(s[i], s[i + 1]));
            }
            rises = rises || exponent(most[h], h) > limit(h);
            factor[h] = 1.0f;
        }
        if (__any_sync(0xffffffffu, rises)) {
            rise(most);
        }
        float sums[2] = {};
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            s[i] = ex2(exponent(s[i], i / 2 % 2));
            sums[i / 2 % 2] += s[i];
        }
        d[0] += sums[0];
        d[1] += sums[1];
    }

    // Of a score's weight. Rounded once, whatever made the maximum rise: equal scores of different
    // tiles have equal weights, however large they are.
    __device__ __forceinline__ float exponent(float score, int h) const {
        return fmaf(score, unit, -base(m[h]));
    }

    // What exponents may be before the maximum rises.
    __device__ __forceinline__ float limit(int h) const { return m[h] > NO_KEY ? LAZY : NO_KEY; }

    // Raises the maxima of rows that have a score too far above, given their lanes' largest scores.
    __device__ __forceinline__ void rise(const float (&most)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float largest = fmaxf(most[h], __shfl_xor_sync(0xffffffffu, most[h], 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            const float old = m[h];
            m[h] = exponent(largest, h) > limit(h) ? __fmul_rn(largest, unit) : old;
            factor[h] = ex2(old - base(m[h]));
            d[h] *= factor[h];
        }
    }
};

}  // namespace cukv
