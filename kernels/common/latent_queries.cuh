// A warp's queries of latent rows in registers, and what it makes of a step with them.
//
// A warp's rows are one tile of 16: lane l holds of its queries, as of scores and sums, what
// common/products.cuh says of rows l / 4 and l / 4 + 8.
#pragma once
#include "common/latent.cuh"
#include "common/warp_state.cuh"

namespace cukv {

// A pair of halves as floats.
__device__ __forceinline__ float2 floats_of_halves(uint32_t pair) {
    return make_float2(
        to_float(__builtin_bit_cast(half, static_cast<uint16_t>(pair))),
        to_float(__builtin_bit_cast(half, static_cast<uint16_t>(pair >> 16))));
}

// A pair of bfloat16 as floats.
__device__ __forceinline__ float2 floats_of_bfloat16s(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// The left operands of a warp's 16 rows, K_STEPS steps of 16 columns each.
template <typename KV, int K_STEPS>
struct LatentQueries {
    uint32_t a[K_STEPS][4];
    float factor[2];  // of fp8 caches: what was divided out of rows l / 4 and l / 4 + 8

    // Rows that are not the tile's come out as any others: nothing of them is kept.
    __device__ __forceinline__
    LatentQueries(const char* q, const QueryRows& layout, const LatentRow (&rows)[2]) {
        const char* from[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            from[i] = q + (rows[i].owned ? layout.offset(rows[i].at) : 0);
            factor[i] = 1.0f;
        }
        // Outside of the loops, so that all loads are on their way before the first is waited for.
        if (layout.kind > KIND_BFLOAT16) {
            load<1, uint8_t>(from);
        } else if (layout.aligned) {
            load<2, uint32_t>(from);
        } else {
            load<2, uint16_t>(from);
        }
        convert(layout.kind);
    }

    // Pairs of elements of BYTES bytes, in the order of columns of common/operands.cuh.
    template <int BYTES, typename Word>
    __device__ __forceinline__ void load(const char* const (&from)[2]) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4 * K_STEPS; ++i) {
            const int k_step = i / 4, pair = i % 4 / 2;
            const int column = k_step * 16 + (is_fp8<KV> ? 4 * t + 2 * pair : 2 * t + 8 * pair);
            const Word* words = reinterpret_cast<const Word*>(from[i % 2] + column * BYTES);
            a[k_step][i % 4] = words[0];
            if constexpr (sizeof(Word) < 2 * BYTES) {
                a[k_step][i % 4] |= uint32_t{words[1]} << 8 * BYTES;
            }
        }
    }

    // From the queries' dtype to operands. Two bytes of fp8 become two halves first.
    __device__ __forceinline__ void convert(int kind) {
        if (kind == KIND_E4M3) {
            each_pair([](uint32_t& pair, int) { pair = halves_of<fp8_e4m3>(pair); });
        } else if (kind == KIND_E5M2) {
            each_pair([](uint32_t& pair, int) { pair = halves_of<fp8_e5m2>(pair); });
        }
        if constexpr (is_fp8<KV>) {
            if (kind == KIND_BFLOAT16) {
                divide_by_largest([](uint32_t pair) { return floats_of_bfloat16s(pair); });
            } else {
                divide_by_largest([](uint32_t pair) { return floats_of_halves(pair); });
            }
        } else if constexpr (is_same<KV, bfloat16>) {
            if (kind > KIND_BFLOAT16) {
                each_pair([](uint32_t& pair, int) {
                    const float2 x = floats_of_halves(pair);
                    pair = cvt_pair<bfloat16>(x.x, x.y);
                });
            }
        }
    }

    // Calls visit(pair, i) for each register, of row l / 4 + 8 * i.
    template <typename Visit>
    __device__ __forceinline__ void each_pair(Visit visit) {
#pragma unroll
        for (int i = 0; i < 4 * K_STEPS; ++i) {
            visit(a[i / 4][i % 4], i % 2);
        }
    }

    // As QueryLoader::divide_by_largest does for rows in shared memory.
    template <typename Floats>
    __device__ __forceinline__ void divide_by_largest(Floats floats_of) {
        float largest[2] = {};
        each_pair([&](uint32_t& pair, int i) {
            const float2 x = floats_of(pair);
            largest[i] = fmaxf(largest[i], fmaxf(fabsf(x.x), fabsf(x.y)));
        });
        float inverse[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
            const int bits = min(max(__float_as_int(largest[i]) >> 23, 1), 253);
            inverse[i] = __int_as_float((254 - bits) << 23);
            factor[i] = __int_as_float(bits << 23);
        }
        each_pair([&](uint32_t& pair, int i) {
            const float2 x = floats_of(pair);
            pair = cvt_pair<half>(x.x * inverse[i], x.y * inverse[i]);
        });
    }
};

// The same while steps are computed: HELD steps stay in registers, for the others there are none.
// Those lie in shared memory as every lane of any warp wants them, a step of a lane in 16 bytes.
template <typename KV, int K_STEPS, int HELD>
struct HeldQueries {
    static constexpr int LEFT = K_STEPS - HELD;
    using Rest = uint4[LEFT > 0 ? LEFT : 1][WARP_SIZE];

    uint32_t a[HELD > 0 ? HELD : 1][4];
    const Rest& rest;

    // `stores`: this warp writes what all warps read behind a barrier.
    __device__ __forceinline__
    HeldQueries(const LatentQueries<KV, K_STEPS>& all, Rest& rest, bool stores)
        : rest(rest) {
#pragma unroll
        for (int i = 0; i < 4 * HELD; ++i) {
            a[i / 4][i % 4] = all.a[i / 4][i % 4];
        }
        if (stores) {
#pragma unroll
            for (int i = HELD; i < K_STEPS; ++i) {
                const auto& x = all.a[i];
                rest[i - HELD][threadIdx.x % WARP_SIZE] = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
    }

    __device__ __forceinline__ void get(uint32_t (&x)[4], int k_step) const {
        if (k_step < HELD) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] = a[k_step][i];
            }
        } else {
            const uint4 y = rest[k_step - HELD][threadIdx.x % WARP_SIZE];
            x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
        }
    }
};

// Four 16-byte chunks of 8 keys, of one ldmatrix, as right operands.
template <typename KV>
struct KeyChunks {
    static constexpr int K_STEPS = is_fp8<KV> ? 4 : 2;
    uint32_t x[4];

    // Of chunks [4 * i, 4 * (i + 1)).
    template <int ROW_BYTES>
    __device__ __forceinline__ void load(uint32_t keys, int i) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        ldmatrix_x4(x, keys + swizzled<ROW_BYTES>(lane_idx % 8, 4 * i + lane_idx / 8));
    }

    __device__ __forceinline__ OperandPair operator[](int k_step) const {
        if constexpr (is_fp8<KV>) {
            return {halves_of<KV>(x[k_step] & 0xffffu), halves_of<KV>(x[k_step] >> 16)};
        } else {
            return {x[2 * k_step], x[2 * k_step + 1]};
        }
    }
};

// Of a row's scores of this warp's keys, in all four lanes of the row.
__device__ __forceinline__ float row_maximum(const float (&s)[4], int half_idx) {
    float m = fmaxf(s[2 * half_idx], s[2 * half_idx + 1]);
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    return fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
}

// The state of 16 rows of which this warp adds up some features, over the keys of all warps; the
// denominators are of its own keys.
template <int FEAT_TILES>
struct LatentState : WarpState<1, 2, FEAT_TILES> {
    // Logits and maxima are in base 2. Where a row's maximum rises by less, weights of up to 2^LAZY
    // are exact too, and sums need not be multiplied.
    static constexpr float LAZY = 8.0f;

    // Turns logits into weights relative to what the row's maximum was when it last rose.
    __device__ __forceinline__ void weigh(float (&s)[4], const float (&maxima)[2]) {
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float& m = this->m[0][i];
            const float m_new = maxima[i] - m > LAZY ? maxima[i] : m;
            const float base = m_new > NO_KEY ? m_new : 0.0f;  // weights of no keys are 0
            factor[i] = ex2(m - base);
            m = m_new;
            s[2 * i] = ex2(s[2 * i] - base);
            s[2 * i + 1] = ex2(s[2 * i + 1] - base);
            this->d[0][i] = this->d[0][i] * factor[i] + (s[2 * i] + s[2 * i + 1]);
        }
        if (!__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
            return;
        }
#pragma unroll
        for (int i = 0; i < 4 * FEAT_TILES; ++i) {
            this->o[0][i / 4][i % 4] *= factor[i % 4 / 2];
        }
    }
};

// Values as common/operands.cuh has them, but fp8 in units of 2^-8: the bits of e4m3 moved to where a
// half has them. That takes integer instructions, while scoring keeps the conversions busy. NaN comes
// out as a number, which no sum sees: the same row's score is NaN too.
template <typename KV>
struct LatentValues : ValueOperands<KV> {
    static_assert(!is_same<KV, fp8_e5m2>, "e5m2 has the exponent of a half");

    // Of numbers in the high bytes of both halves of a word.
    static __device__ __forceinline__ uint32_t halves_of_high_bytes(uint32_t x) {
        return (x & 0x80008000u) | (x >> 1 & 0x3f803f80u);
    }

    __device__ __forceinline__ void get(int j, OperandPair& even, OperandPair& odd) const {
        if constexpr (is_fp8<KV>) {
            const uint32_t low = this->x[2 * j], high = this->x[2 * j + 1];
            even = {halves_of_high_bytes(low << 8), halves_of_high_bytes(high << 8)};
            odd = {halves_of_high_bytes(low), halves_of_high_bytes(high)};
        } else {
            ValueOperands<KV>::get(j, even, odd);
        }
    }
};

// o += weights v for TOKENS values of a buffer and tiles of 8 features from first_tile on; the
// weights of 16 rows begin at `weights`, in swizzled rows of 128 bytes.
template <typename KV, int ROW_BYTES, int TOKENS, int FEAT_TILES>
__device__ __forceinline__ void multiply_latent_values(
    float (&o)[FEAT_TILES][4], uint32_t weights, uint32_t values, int first_tile) {
    using Values = LatentValues<KV>;
    const int lane_idx = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int token = 0; token < TOKENS; token += Values::TOKENS) {
        uint32_t a[Values::TOKENS / 16][4];
#pragma unroll
        for (int j = 0; j < Values::TOKENS / 16; ++j) {
            const int chunk = token / 8 + 2 * j + lane_idx / 16;
            ldmatrix_x4(a[j], weights + swizzled<128>(lane_idx % 16, chunk));
        }
#pragma unroll
        for (int tile = 0; tile < FEAT_TILES; tile += 2) {
            Values b;
            b.template load<ROW_BYTES>(values, token, first_tile + tile);
#pragma unroll
            for (int j = 0; j < Values::TOKENS / 16; ++j) {
                OperandPair even, odd;
                b.get(j, even, odd);
                mma_m16n8k16<Operand<KV>>(o[tile], a[j], even.b0, even.b1);
                mma_m16n8k16<Operand<KV>>(o[tile + 1], a[j], odd.b0, odd.b1);
            }
        }
    }
}

}  // namespace cukv
