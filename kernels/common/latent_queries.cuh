// A warp's queries of latent rows in registers, and what it makes of a step with them.
//
// A warp's rows are one tile of 16: lane l holds of its queries, as of scores and sums, what
// common/products.cuh says of rows l / 4 and l / 4 + 8.
#pragma once
#include "common/latent.cuh"
#include "common/warp_state.cuh"

namespace cukv {

// Where the queries of 16 rows lie in shared memory, K_STEPS steps of 16 columns, on their way to
// be left operands of KV. Those of 16 bits lie in swizzled rows, as ldmatrix takes them. With fp8,
// whose columns have an order of their own (KeyOperands), a lane's operands of a step are 16 bytes,
// so that they come into neighbouring registers; lanes are swizzled, because a row is written by
// step.
template <typename KV, int K_STEPS>
struct QueryOperands {
    // Eight columns of a row.
    static __device__ __forceinline__ void store(
        char* tile, int row, int chunk, const Vec<Operand<KV>, 8>& x) {
        if constexpr (is_fp8<KV>) {
            const uint32_t words[4] = {x.raw.x, x.raw.y, x.raw.z, x.raw.w};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int lane_idx = row % 8 * 4 + chunk % 2 * 2 + i;
                auto* to = reinterpret_cast<uint32_t*>(tile + place(chunk / 2, lane_idx));
                to[row / 8] = words[2 * i];
                to[row / 8 + 2] = words[2 * i + 1];
            }
        } else {
            store_vec(tile + swizzled<K_STEPS * 32>(row, chunk), x);
        }
    }

    // A step, as a lane wants it.
    static __device__ __forceinline__ void load(uint32_t (&a)[4], const char* tile, int k_step) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        if constexpr (is_fp8<KV>) {
            const uint4 x = *reinterpret_cast<const uint4*>(tile + place(k_step, lane_idx));
            a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
        } else {
            const int at = swizzled<K_STEPS * 32>(lane_idx % 16, 2 * k_step + lane_idx / 16);
            ldmatrix_x4(a, smem_address(tile + at));
        }
    }

    // Of a lane's 16 bytes of fp8.
    static __device__ __forceinline__ int place(int k_step, int lane_idx) {
        return k_step * (16 * WARP_SIZE) + (lane_idx ^ k_step % 8) * 16;
    }
};

// The queries of a tile of 16 rows in shared memory.
template <typename CKV, typename KPE>
struct LatentQueryTile {
    static constexpr int NOPE_STEPS = HEAD_DIM_CKV / 16, PE_STEPS = HEAD_DIM_KPE / 16;
    using NopeOperands = QueryOperands<CKV, NOPE_STEPS>;
    using PeOperands = QueryOperands<KPE, PE_STEPS>;

    char nope[16 * HEAD_DIM_CKV * 2];
    char pe[16 * HEAD_DIM_KPE * 2];

    // What the scores of a row are multiplied by to be logits in base 2: its two products.
    using Scales = float2[16];

    // The queries of an item on their way, by WARPS warps: a lane's chunks of its warp's rows. Rows
    // past the tile's are as any others: nothing of them is kept.
    template <int WARPS>
    struct Loader {
        static constexpr int NUM = 16 / WARPS;  // rows of a warp

        Query8 nope_chunks[NUM][2], pe_chunks[NUM][1];

        static __device__ __forceinline__ int row(int i) {
            return threadIdx.x / WARP_SIZE * NUM + i;
        }

        static __device__ __forceinline__ bool has_pe() {
            return threadIdx.x % WARP_SIZE < HEAD_DIM_KPE / 8;
        }

        __device__ __forceinline__ void load(const LatentParams& p, const Item& item, int block) {
            const int lane_idx = threadIdx.x % WARP_SIZE;
            const int num_bytes = 8 * element_bytes(p.q_nope_rows.kind);  // q_pe is alike
#pragma unroll
            for (int i = 0; i < NUM; ++i) {
                const LatentRow from(p, item, block, row(i));
                const char* q_nope = p.q_nope + (from.owned ? p.q_nope_rows.offset(from.at) : 0);
                const char* q_pe = p.q_pe + (from.owned ? p.q_pe_rows.offset(from.at) : 0);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    nope_chunks[i][j].load(
                        q_nope + (lane_idx + j * WARP_SIZE) * num_bytes, p.q_nope_rows.kind,
                        p.q_nope_rows.aligned);
                }
                pe_chunks[i][0].bits = uint4{};
                if (has_pe()) {
                    pe_chunks[i][0].load(
                        q_pe + lane_idx * num_bytes, p.q_pe_rows.kind, p.q_pe_rows.aligned);
                }
            }
        }

        __device__ __forceinline__ void store(
            LatentQueryTile& to, const LatentParams& p, Scales& scales) const {
#pragma unroll
            for (int i = 0; i < NUM; ++i) {
                const float nope_factor = to.template store<CKV, NopeOperands>(
                    to.nope, row(i), nope_chunks[i], p.q_nope_rows.kind, true);
                const float pe_factor = to.template store<KPE, PeOperands>(
                    to.pe, row(i), pe_chunks[i], p.q_pe_rows.kind, has_pe());
                if (threadIdx.x % WARP_SIZE == 0) {
                    const float scale = p.sm_scale * LOG2_E;
                    scales[row(i)] = {
                        nope_factor * scale * p.ckv_scale.get(),
                        pe_factor * scale * p.kpe_scale.get()};
                }
            }
        }
    };

    // Stores a lane's chunks of a row, WARP_SIZE apart, as operands of KV, by a warp; gives what
    // was divided out of them.
    template <typename KV, typename Operands, int NUM>
    static __device__ __forceinline__ float store(
        char* tile, int row, const Query8 (&x)[NUM], int kind, bool stores) {
        constexpr int KIND = is_same<KV, bfloat16> ? KIND_BFLOAT16 : KIND_HALF;
        float factor = 1.0f, inverse = 1.0f;
        if constexpr (is_fp8<KV>) {
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < NUM; ++i) {
                float floats[8];
                x[i].to_floats(floats, kind);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    largest = fmaxf(largest, fabsf(floats[e]));
                }
            }
#pragma unroll
            for (int distance = WARP_SIZE / 2; distance > 0; distance /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
            }
            // As QueryLoader::divide_by_largest.
            const int bits = min(max(__float_as_int(largest) >> 23, 1), 253);
            inverse = __int_as_float((254 - bits) << 23);
            factor = __int_as_float(bits << 23);
        }
#pragma unroll
        for (int i = 0; i < NUM; ++i) {
            Vec<Operand<KV>, 8> y;
            y.raw = x[i].bits;
            if (is_fp8<KV> || kind != KIND) {
                float floats[8];
                x[i].to_floats(floats, kind);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    y[e] = from_float<Operand<KV>>(floats[e] * inverse);
                }
            }
            if (stores) {
                Operands::store(tile, row, threadIdx.x % WARP_SIZE + i * WARP_SIZE, y);
            }
        }
        return factor;
    }
};

// The left operands of a warp's 16 rows, K_STEPS steps of 16 columns: HELD of them stay in
// registers. For the others there are none: those lie in shared memory as every lane of any warp
// wants them, a step of a lane in 16 bytes.
template <typename KV, int K_STEPS, int HELD>
struct HeldQueries {
    static constexpr int LEFT = K_STEPS - HELD;
    using Rest = uint4[LEFT > 0 ? LEFT : 1][WARP_SIZE];

    uint32_t a[HELD > 0 ? HELD : 1][4];
    const Rest& rest;

    __device__ __forceinline__ explicit HeldQueries(const Rest& rest) : rest(rest) {}

    // `stores`: this warp writes what all warps read behind a barrier.
    __device__ __forceinline__ void load(const char* queries, Rest& to, bool stores) {
#pragma unroll
        for (int i = 0; i < K_STEPS; ++i) {
            uint32_t x[4];
            if (i < HELD || stores) {
                QueryOperands<KV, K_STEPS>::load(x, queries, i);
            }
            if (i < HELD) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    a[i][j] = x[j];
                }
            } else if (stores) {
                to[i - HELD][threadIdx.x % WARP_SIZE] = make_uint4(x[0], x[1], x[2], x[3]);
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
            return halves_of_four<KV>(x[k_step]);
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
// denominators are of its own keys. Maxima are lazy, and the same in all warps.
template <int FEAT_TILES>
struct LatentState : WarpState<1, FEAT_TILES> {
    // Weights of logits in base 2, relative to the rows' maxima, and whether one is so far above
    // its row's maximum that this has to rise before.
    __device__ __forceinline__ bool weigh(float (&weights)[4], const float (&s)[4]) const {
        bool rises = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float m = this->m[0][i / 2];
            const bool has_key = m > NO_KEY;
            const float exponent = s[i] - (has_key ? m : 0.0f);  // weights of no keys are 0
            rises = rises || exponent > (has_key ? LAZY : NO_KEY);
            weights[i] = ex2(exponent);
        }
        return rises;
    }

    __device__ __forceinline__ void add_weights(const float (&weights)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            this->d[0][i] += weights[2 * i] + weights[2 * i + 1];
        }
    }

    // Lets maxima rise to those of all warps' logits of a step.
    __device__ __forceinline__ void raise(const float (&maxima)[2]) {
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float& m = this->m[0][i];
            const float m_new = fmaxf(m, maxima[i]);
            factor[i] = ex2(m - (m_new > NO_KEY ? m_new : 0.0f));
            m = m_new;
            this->d[0][i] *= factor[i];
        }
#pragma unroll
        for (int i = 0; i < 4 * FEAT_TILES; ++i) {
            this->o[0][i / 4][i % 4] *= factor[i % 4 / 2];
        }
    }
};

// o += weights v for TOKENS values of a buffer and tiles of 8 features from first_tile on; the
// weights of 16 rows begin at `weights`, in swizzled rows of 128 bytes.
template <typename KV, int ROW_BYTES, int TOKENS, int FEAT_TILES>
__device__ __forceinline__ void multiply_latent_values(
    float (&o)[FEAT_TILES][4], uint32_t weights, uint32_t values, int first_tile) {
    using Values = ValueOperands<KV>;
    const int lane_idx = threadIdx.x % WARP_SIZE;
    const uint32_t from = Values::template address<ROW_BYTES>(values);
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
            if (is_fp8<KV> && tile % 4 == 0) {
                __syncwarp();  // keeps the compiler from loading all tiles first, and spilling
            }
            Values b;
            b.template load<ROW_BYTES>(from, token, first_tile + tile);
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
