// The online softmax of a warpgroup's 64 rows while its products go on.
//
// A lane holds rows g and g + 8 of its warp's 16, as common/products.cuh says. Scores of a step
// wait in `s`, become weights there, and are packed as the left operand of the second product,
// which runs together with the next step's first product. So sums are a step behind. Where only a
// step's first KEYS count, so many scores and weights are worked with.
#pragma once
#include "common/products.cuh"
#include "common/ptx_wgmma.cuh"

namespace cukv {

// What weights of this lane's rows are relative to, an unscaled score, and the denominator, of the
// lane's own keys only.
struct RowStates {
    float m[2] = {NO_KEY, NO_KEY};
    float d[2] = {0.0f, 0.0f};
};

template <typename KV, int TOKENS, int HEAD_DIM>
struct WarpgroupState {
    // Weights may be so large, as a power of two, before what they are relative to moves up.
    static constexpr float MOST = is_same<KV, half> ? 10.0f : 30.0f;

    static constexpr int O_VALUES = HEAD_DIM / 2;  // sums of a lane

    float s[TOKENS / 8][4];
    float o[HEAD_DIM / 8][4];
    uint32_t weights[TOKENS / 16][4];
    RowStates rows;
    float factor[2];    // of the sums so far
    float step_sum[2];  // of the weights of a step, until catch_up
    float step_m[2];

    __device__ __forceinline__ WarpgroupState() : s{}, o{} {}

    template <int KEYS>
    __device__ __forceinline__ float (&scores())
        [KEYS / 8][4] { return reinterpret_cast<float (&)[KEYS / 8][4]>(s); }

    template <int KEYS>
    __device__ __forceinline__ void step_maximum() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float m = rows.m[h];
#pragma unroll
            for (int tile = 0; tile < KEYS / 8; ++tile) {
                m = fmaxf(m, fmaxf(s[tile][2 * h], s[tile][2 * h + 1]));
            }
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
            step_m[h] = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        }
    }

    // Scores become weights relative to `base`, the same for all keys of a row.
    template <int KEYS>
    __device__ __forceinline__ void weigh_by(const float (&base)[2], float scale) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = 0.0f;
#pragma unroll
            for (int tile = 0; tile < KEYS / 8; ++tile) {
                float* pair = &s[tile][2 * h];
                pair[0] = ex2(fmaf(pair[0], scale, -base[h]));
                pair[1] = ex2(fmaf(pair[1], scale, -base[h]));
                sum += pair[0] + pair[1];
            }
            step_sum[h] = sum;
        }
    }

    // The same relative to the maximum with this step, as usual. A row may have seen no key yet.
    template <int KEYS>
    __device__ __forceinline__ void weigh(float scale) {
        step_maximum<KEYS>();
        float base[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            base[h] = step_m[h] > NO_KEY ? step_m[h] * scale : 0.0f;
        }
        weigh_by<KEYS>(base, scale);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float fade = ex2(__fmul_rn(rows.m[h], scale) - base[h]);
            rows.d[h] = rows.d[h] * fade + step_sum[h];
            rows.m[h] = step_m[h];
            factor[h] = fade;
        }
    }

    // The same relative to what weights were before, so that exponentials need not wait for this
    // step's maximum, which is only needed by catch_up. All rows see all keys.
    __device__ __forceinline__ void weigh_as_before(float scale) {
        const float base[2] = {rows.m[0] * scale, rows.m[1] * scale};
        step_maximum<TOKENS>();
        weigh_by<TOKENS>(base, scale);
    }

    // Takes the weights of weigh_as_before, most of the time as they are. Scores far above those
    // that weights are relative to are made again, by `rescore`, and weighed anew.
    template <typename Rescore>
    __device__ __forceinline__ void catch_up(float scale, Rescore rescore) {
        bool fits = true;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // A row of NaNs, which may lie behind the item's own, asks for nothing.
            fits = fits && !((step_m[h] - rows.m[h]) * scale > MOST);
        }
        if (__any_sync(0xffffffffu, !fits)) {
            rescore(s);
            const float base[2] = {step_m[0] * scale, step_m[1] * scale};
            weigh_by<TOKENS>(base, scale);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float fade = ex2(__fmul_rn(rows.m[h], scale) - base[h]);
                rows.d[h] *= fade;
                rows.m[h] = step_m[h];
#pragma unroll
                for (int tile = 0; tile < HEAD_DIM / 8; ++tile) {
                    o[tile][2 * h] *= fade;
                    o[tile][2 * h + 1] *= fade;
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            rows.d[h] += step_sum[h];
        }
    }

    // Multiplies the sums by `factor`. Most steps raise no maximum.
    __device__ __forceinline__ void rescale() {
        if (__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 2; ++i) {
                o[i / 4][i % 4] *= factor[i % 4 / 2];
            }
        }
    }

    // Weights of the keys that do not count are 0.
    template <int KEYS>
    __device__ __forceinline__ void pack() {
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) {
            pack_weights<KV>(weights[i], s[2 * i], s[2 * i + 1]);
        }
#pragma unroll
        for (int i = KEYS / 16 * 4; i < TOKENS / 4; ++i) {
            weights[i / 4][i % 4] = 0;
        }
    }
};

}  // namespace cukv
