// The two products of attention with operands swapped, and the online softmax between them, by one
// warp: scores^T = k q^T and sums^T += v^T weights^T.
//
// Keys, and features of values, are the 16 rows of a tensor core's product and query rows are its 8
// columns: so 8 query rows fill it, and no operand is zeros. With g = l / 4 and t = l % 4, lane l holds
//
//   scores [n][i][2 * h + e] = key 16 i + 8 h + g  of row 8 n + 2 t + e
//   sums   [n][i][2 * h + e] = feature 16 i + 8 h + g  (fp8: 16 i + 2 g + h)  of row 8 n + 2 t + e
//
// fp8 becomes half, which holds it exactly. ldmatrix moves 16-bit units, so a lane gets two bytes
// of fp8 where it gets one element of 16 bits, and the order of columns differs:
//
//   keys    a register is columns 4 t to 4 t + 3 of a key, where the product wants 2 t, 2 t + 1 and
//           2 t + 8, 2 t + 9. It may take columns in any order if queries come in the same.
//   values  a register is features 2 g and 2 g + 1 of two keys: the first are row g of the product,
//           the second row g + 8.
#pragma once
#include "common/operands.cuh"
#include "common/queries.cuh"

namespace cukv {

// Scores, then logits, then weights of ROWS query rows and TOKENS keys.
template <int ROWS, int TOKENS>
struct SwappedScores {
    static constexpr int N_TILES = ROWS / 8, TILES = TOKENS / 16;
    static_assert(ROWS % 8 == 0 && TOKENS % 16 == 0, "whole tiles of a tensor core");

    float x[N_TILES][TILES][4];

    __device__ __forceinline__ SwappedScores() : x{} {}
};

// The rows of which a lane holds scores and sums.
__device__ __forceinline__ int swapped_row(int n_tile, int e) {
    return n_tile * 8 + threadIdx.x % 4 * 2 + e;
}

// Calls visit(score, n_tile, e, row, token) for each of this lane's scores; `token` counts from the
// first of the step.
template <int ROWS, int TOKENS, typename Visit>
__device__ __forceinline__ void each_score(SwappedScores<ROWS, TOKENS>& s, Visit visit) {
    using Scores = SwappedScores<ROWS, TOKENS>;
    const int g = threadIdx.x % WARP_SIZE / 4;
#pragma unroll
    for (int n_tile = 0; n_tile < Scores::N_TILES; ++n_tile) {
#pragma unroll
        for (int tile = 0; tile < Scores::TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int e = i % 2, token = tile * 16 + i / 2 * 8 + g;
                visit(s.x[n_tile][tile][i], n_tile, e, swapped_row(n_tile, e), token);
            }
        }
    }
}

// A tile's queries as right operands. Loaded once if they STAY in registers, else every time that
// they are asked for.
template <typename KV, int HEAD_DIM, int ROWS, bool STAY_>
struct SwappedQueries {
    static constexpr bool STAY = STAY_;
    static constexpr int N_TILES = ROWS / 8, K_STEPS = HEAD_DIM / 16;

    using Step = uint2[N_TILES];  // 16 columns of all rows

    const QueryTile<KV, HEAD_DIM, ROWS>& tile;
    Step held[STAY ? K_STEPS : 1];

    __device__ __forceinline__ explicit SwappedQueries(const QueryTile<KV, HEAD_DIM, ROWS>& tile)
        : tile(tile) {
        if constexpr (STAY) {
#pragma unroll
            for (int k_step = 0; k_step < K_STEPS; ++k_step) {
                load(held[k_step], k_step);
            }
        }
    }

    __device__ __forceinline__ void load(Step& b, int k_step) const {
        const int g = threadIdx.x % WARP_SIZE / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int n_tile = 0; n_tile < N_TILES; ++n_tile) {
            const Operand<KV>* q = &tile.x[n_tile * 8 + g][k_step * 16];
            if constexpr (is_fp8<KV>) {
                b[n_tile] = *reinterpret_cast<const uint2*>(q + 4 * t);
            } else {
                b[n_tile].x = *reinterpret_cast<const uint32_t*>(q + 2 * t);
                b[n_tile].y = *reinterpret_cast<const uint32_t*>(q + 2 * t + 8);
            }
        }
    }

    __device__ __forceinline__ void get(Step& b, int k_step) const {
        if constexpr (STAY) {
#pragma unroll
            for (int n_tile = 0; n_tile < N_TILES; ++n_tile) {
                b[n_tile] = held[k_step][n_tile];
            }
        } else {
            load(b, k_step);
        }
    }
};

// 16 columns of KEYS keys as left operands, of one ldmatrix.
template <typename KV>
struct SwappedKeys {
    static constexpr int KEYS = is_fp8<KV> ? 32 : 16;
    uint32_t x[4];

    // The address that load() takes, for k_step 0 of the buffer's first keys.
    template <int ROW_BYTES>
    static __device__ __forceinline__ uint32_t address(uint32_t buffer) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        return buffer + (is_fp8<KV> ? swizzled<ROW_BYTES>(lane_idx, 0)
                                    : swizzled<ROW_BYTES>(lane_idx % 16, lane_idx / 16));
    }

    template <int ROW_BYTES>
    __device__ __forceinline__ void load(uint32_t address, int key, int k_step) {
        ldmatrix_x4(x, rows_on<ROW_BYTES>(chunks_on(address, k_step * (is_fp8<KV> ? 1 : 2)), key));
    }

    // Of the j-th 16 keys.
    __device__ __forceinline__ void get(uint32_t (&a)[4], int j) const {
        if constexpr (is_fp8<KV>) {
            a[0] = halves_of<KV>(x[2 * j] & 0xffffu), a[2] = halves_of<KV>(x[2 * j] >> 16);
            a[1] = halves_of<KV>(x[2 * j + 1] & 0xffffu), a[3] = halves_of<KV>(x[2 * j + 1] >> 16);
        } else {
            a[0] = x[0], a[1] = x[1], a[2] = x[2], a[3] = x[3];
        }
    }
};

// 16 features of KEYS values as left operands, of one ldmatrix.
template <typename KV>
struct SwappedValues {
    static constexpr int KEYS = is_fp8<KV> ? 32 : 16;
    uint32_t x[4];

    // The address that load() takes, for features 0 to 15 of the buffer's first values.
    template <int ROW_BYTES>
    static __device__ __forceinline__ uint32_t address(uint32_t buffer) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        const int row = lane_idx % 8 + lane_idx / 16 * 8, chunk = lane_idx / 8 % 2;
        return buffer +
               (is_fp8<KV> ? swizzled<ROW_BYTES>(lane_idx, 0) : swizzled<ROW_BYTES>(row, chunk));
    }

    template <int ROW_BYTES>
    __device__ __forceinline__ void load(uint32_t address, int key, int tile) {
        ldmatrix_x4_trans(
            x, rows_on<ROW_BYTES>(chunks_on(address, tile * (is_fp8<KV> ? 1 : 2)), key));
    }

    // Of the j-th 16 keys.
    __device__ __forceinline__ void get(uint32_t (&a)[4], int j) const {
        if constexpr (is_fp8<KV>) {
            // Both keys' first features to the low half, the second ones to the high half.
            const uint32_t low = __byte_perm(x[2 * j], 0, 0x3120);
            const uint32_t high = __byte_perm(x[2 * j + 1], 0, 0x3120);
            a[0] = halves_of<KV>(low & 0xffffu), a[1] = halves_of<KV>(low >> 16);
            a[2] = halves_of<KV>(high & 0xffffu), a[3] = halves_of<KV>(high >> 16);
        } else {
            a[0] = x[0], a[1] = x[1], a[2] = x[2], a[3] = x[3];
        }
    }
};

// s += k q^T for the keys of a buffer, which begins at `keys`.
template <typename KV, int ROW_BYTES, typename Queries, int ROWS, int TOKENS>
__device__ __forceinline__ void multiply_keys(
    SwappedScores<ROWS, TOKENS>& s, const Queries& queries, uint32_t keys) {
    using Keys = SwappedKeys<KV>;
    static_assert(TOKENS % Keys::KEYS == 0, "keys are loaded whole ldmatrix at a time");
    const uint32_t from = Keys::template address<ROW_BYTES>(keys);
#pragma unroll(Queries::STAY ? Queries::K_STEPS : 4)
    for (int k_step = 0; k_step < Queries::K_STEPS; ++k_step) {
        typename Queries::Step b;
        queries.get(b, k_step);
#pragma unroll
        for (int key = 0; key < TOKENS; key += Keys::KEYS) {
            Keys keys_16;
            keys_16.template load<ROW_BYTES>(from, key, k_step);
#pragma unroll
            for (int j = 0; j < Keys::KEYS / 16; ++j) {
                uint32_t a[4];
                keys_16.get(a, j);
#pragma unroll
                for (int n_tile = 0; n_tile < ROWS / 8; ++n_tile) {
                    float (&c)[4] = s.x[n_tile][key / 16 + j];
                    mma_m16n8k16<Operand<KV>>(c, a, b[n_tile].x, b[n_tile].y);
                }
            }
        }
    }
}

// The state of an online softmax over a warp's own keys.
//
// `m` of a row is the largest logit up to some step, and no later one is more than SLACK above it:
// what is relative to it stays far below where half ends, and most steps need no exchange between
// lanes to find the largest. It is the same in all lanes of the row; the denominator is of each
// lane's own keys only, because adding up can wait until the state is stored.
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

    // Turns logits into weights relative to the rows' m, which they may raise.
    template <int TOKENS>
    __device__ __forceinline__ void weigh(SwappedScores<ROWS, TOKENS>& s) {
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
            above = above || largest[n_tile][e] > m[n_tile][e] + SLACK;
        }
        if (__any_sync(0xffffffffu, above)) {
            raise(largest);
        }
        float sum[N_TILES][2] = {};
        each_score(s, [&](float& x, int n_tile, int e, int, int) {
            x = ex2(x - base(n_tile, e));
            sum[n_tile][e] += x;
        });
#pragma unroll
        for (int i = 0; i < N_TILES * 2; ++i) {
            d[i / 2][i % 2] += sum[i / 2][i % 2];
        }
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

    // Adds the values of a buffer, which begins at `values`, times their weights.
    template <int ROW_BYTES, int TOKENS>
    __device__ __forceinline__ void add(const SwappedScores<ROWS, TOKENS>& s, uint32_t values) {
        using Values = SwappedValues<KV>;
        static_assert(TOKENS % Values::KEYS == 0, "values are loaded whole ldmatrix at a time");
        const uint32_t from = Values::template address<ROW_BYTES>(values);
        uint2 b[TOKENS / 16][N_TILES];
#pragma unroll
        for (int i = 0; i < TOKENS / 16 * N_TILES; ++i) {
            const int tile = i / N_TILES, n_tile = i % N_TILES;
            const float (&x)[4] = s.x[n_tile][tile];
            b[tile][n_tile].x = movmatrix_trans(cvt_pair<Operand<KV>>(x[0], x[1]));
            b[tile][n_tile].y = movmatrix_trans(cvt_pair<Operand<KV>>(x[2], x[3]));
        }
#pragma unroll
        for (int tile = 0; tile < FEAT_TILES; ++tile) {
            if (is_fp8<KV> && tile % 4 == 0) {
                __syncwarp();  // keeps the compiler from loading all tiles first, and spilling
            }
#pragma unroll
            for (int key = 0; key < TOKENS; key += Values::KEYS) {
                Values values_16;
                values_16.template load<ROW_BYTES>(from, key, tile);
#pragma unroll
                for (int j = 0; j < Values::KEYS / 16; ++j) {
                    uint32_t a[4];
                    values_16.get(a, j);
#pragma unroll
                    for (int n_tile = 0; n_tile < N_TILES; ++n_tile) {
                        const uint2& weights = b[key / 16 + j][n_tile];
                        mma_m16n8k16<Operand<KV>>(o[n_tile][tile], a, weights.x, weights.y);
                    }
                }
            }
        }
    }
};

// States of the warps of a CTA in shared memory, all of the same rows. The padding of a row puts
// the rows that a warp stores together on different banks.
template <int WARPS, int ROWS, int HEAD_DIM>
struct WarpStates {
    float o[WARPS][ROWS][HEAD_DIM + 4];
    float m[WARPS][ROWS];
    float d[WARPS][ROWS];

    // By all warps, each its own.
    template <typename KV>
    __device__ __forceinline__ void store(const SwappedState<KV, ROWS, HEAD_DIM>& warp) {
        const int warp_idx = threadIdx.x / WARP_SIZE, g = threadIdx.x % WARP_SIZE / 4;
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) {
            const int n_tile = i / 2, e = i % 2, row = swapped_row(n_tile, e);
            float sum = warp.d[n_tile][e];
            sum += __shfl_xor_sync(0xffffffffu, sum, 4);
            sum += __shfl_xor_sync(0xffffffffu, sum, 8);
            sum += __shfl_xor_sync(0xffffffffu, sum, 16);
            if (g == 0) {
                m[warp_idx][row] = warp.m[n_tile][e];
                d[warp_idx][row] = sum;
            }
#pragma unroll
            for (int tile = 0; tile < HEAD_DIM / 16; ++tile) {
                const float (&x)[4] = warp.o[n_tile][tile];
                float* to = o[warp_idx][row] + tile * 16;
                if constexpr (is_fp8<KV>) {
                    *reinterpret_cast<float2*>(to + 2 * g) = make_float2(x[e], x[2 + e]);
                } else {
                    to[g] = x[e];
                    to[8 + g] = x[2 + e];
                }
            }
        }
    }

    // Four sums of a row over all warps, from first_warp on, which is the order of the keys' steps.
    __device__ __forceinline__ State<1, 4> merge(int row, int feat, int first_warp) const {
        float m_of[WARPS];
        State<1, 4> state;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            m_of[i] = m[(first_warp + i) % WARPS][row];
            state.m = fmaxf(state.m, m_of[i]);
        }
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const int warp_idx = (first_warp + i) % WARPS;
            const float4 x = *reinterpret_cast<const float4*>(&o[warp_idx][row][feat]);
            const float sums[1][4] = {{x.x, x.y, x.z, x.w}};
            state.add(m_of[i], d[warp_idx][row], sums);
        }
        return state;
    }
};

}  // namespace cukv
