// Query rows in, results out: elements of a dtype that is known at run time only.
//
// Row r of an item's tile is packed row first_row + r of the request: all query heads of the KV
// head for the request's first query, then all for the next.
#pragma once
#include "common/operands.cuh"
#include "common/softmax.cuh"
#include "common/work.cuh"

namespace cukv {

constexpr float LOG2_E = 1.44269504f;

// Dtypes by number. Queries and results are a small part of the bytes, so that a kernel for each
// pair of dtypes would only take longer to compile.
constexpr int KIND_HALF = 0, KIND_BFLOAT16 = 1, KIND_FLOAT = 2, KIND_E4M3 = 3, KIND_E5M2 = 4;

// Of the operands of a cache.
template <typename KV>
constexpr int KIND_OF = is_same<Operand<KV>, half> ? KIND_HALF : KIND_BFLOAT16;

// Where a row of a tile is in q, o and lse.
struct PackedRow {
    int64_t q_row;
    int64_t qo_head;

    __device__ __forceinline__
    PackedRow(const Divisor& group, const Item& item, int kv_head, int row) {
        const uint32_t packed = item.first_row + row;
        const uint32_t query = group.quotient(packed);
        q_row = item.first_q_row + query;
        qo_head = int64_t{kv_head} * group.divisor + packed - query * group.divisor;
    }

    // The same in an array whose rows are others; null: they are not.
    __device__ __forceinline__ PackedRow in(const int32_t* rows) const {
        PackedRow other = *this;
        other.q_row = rows == nullptr ? q_row : rows[q_row];
        return other;
    }
};

// Query rows and results: [rows, num_qo_heads, ...], strides in bytes.
struct QueryRows {
    int64_t row_stride;
    int64_t head_stride;
    int32_t kind;     // of element: KIND_*
    int32_t aligned;  // 1: vectors of 16 bytes (q) or of 4 elements (o) may be moved whole

    __device__ __forceinline__ int64_t offset(const PackedRow& at) const {
        return at.q_row * row_stride + at.qo_head * head_stride;
    }
};

__device__ __forceinline__ float load_element(const char* from, int kind) {
    switch (kind) {
        case KIND_HALF:
            return to_float(*reinterpret_cast<const half*>(from));
        case KIND_BFLOAT16:
            return to_float(*reinterpret_cast<const bfloat16*>(from));
        case KIND_FLOAT:
            return *reinterpret_cast<const float*>(from);
        case KIND_E4M3:
            return to_float(*reinterpret_cast<const fp8_e4m3*>(from));
        case KIND_E5M2:
        default:
            return to_float(*reinterpret_cast<const fp8_e5m2*>(from));
    }
}

__device__ __forceinline__ int element_bytes(int kind) {
    return kind == KIND_FLOAT ? 4 : kind <= KIND_BFLOAT16 ? 2 : 1;
}

// Eight elements of a query row as they lie in memory, on their way.
struct Query8 {
    uint4 bits;

    // From `from`, which is aligned to 16 bytes if `aligned`.
    __device__ __forceinline__ void load(const char* from, int kind, bool aligned) {
        const int num_bytes = 8 * element_bytes(kind);
        if (aligned && num_bytes == 16) {
            bits = *reinterpret_cast<const uint4*>(from);
        } else if (aligned) {
            const uint2 half_bits = *reinterpret_cast<const uint2*>(from);
            bits = make_uint4(half_bits.x, half_bits.y, 0, 0);
        } else {
            uint32_t words[4] = {};
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const uint32_t byte = i < num_bytes ? static_cast<uint8_t>(from[i]) : 0;
                words[i / 4] |= byte << 8 * (i % 4);
            }
            bits = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }

    __device__ __forceinline__ void to_floats(float (&x)[8], int kind) const {
        const int num_bytes = element_bytes(kind);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
            if (num_bytes == 2) {
                const uint16_t element = words[i / 2] >> 16 * (i % 2);
                x[i] = kind == KIND_HALF ? to_float(__builtin_bit_cast(half, element))
                                         : __uint_as_float(uint32_t{element} << 16);
            } else {
                const uint8_t element = words[i / 4] >> 8 * (i % 4);
                x[i] = kind == KIND_E4M3 ? to_float(__builtin_bit_cast(fp8_e4m3, element))
                                         : to_float(__builtin_bit_cast(fp8_e5m2, element));
            }
        }
    }
};

// The query rows of a tile in shared memory, as operands. The padding puts the rows that a warp
// reads together on different banks.
template <typename KV, int HEAD_DIM, int ROWS>
struct QueryTile {
    alignas(16) Operand<KV> x[ROWS][HEAD_DIM + 8];
    float factor[ROWS];  // of fp8 caches: what was divided out of a row

    __device__ __forceinline__ float factor_of(int row) const {
        return is_fp8<KV> ? factor[row] : 1.0f;
    }
};

// A thread's share of a tile's query rows on their way: loaded an item ahead, stored as operands
// when the tile is free. Params: q, q_rows, levels, group, head_dim.
template <typename KV, int HEAD_DIM, int ROWS, int THREADS>
struct QueryLoader {
    static constexpr int CHUNKS = HEAD_DIM / 8;  // of a row
    static constexpr int NUM = ROWS * CHUNKS < THREADS ? 1 : ROWS * CHUNKS / THREADS;
    static_assert(THREADS % CHUNKS == 0, "a thread has one chunk of each of its rows");
    static_assert(!is_fp8<KV> || CHUNKS <= WARP_SIZE, "the lanes of a row find its largest");

    Query8 x[NUM];

    static __device__ __forceinline__ int row_of(int i) {
        return (threadIdx.x + i * THREADS) / CHUNKS;
    }
    static __device__ __forceinline__ int feat() { return threadIdx.x % CHUNKS * 8; }

    // Zeros past the tile's rows and head_dim.
    template <typename Params>
    __device__ __forceinline__ void load(const Params& p, const Item& item, int kv_head) {
#pragma unroll
        for (int i = 0; i < NUM; ++i) {
            x[i].bits = uint4{};
            if (row_of(i) < item.num_rows && feat() < p.head_dim) {
                const PackedRow row(p.group, item, kv_head, row_of(i));
                const PackedRow at = row.in(p.levels.q_rows);
                const int num_bytes = feat() * element_bytes(p.q_rows.kind);
                x[i].load(p.q + p.q_rows.offset(at) + num_bytes, p.q_rows.kind, p.q_rows.aligned);
            }
        }
    }

    __device__ __forceinline__ void store(QueryTile<KV, HEAD_DIM, ROWS>& tile, int kind) const {
#pragma unroll
        for (int i = 0; i < NUM; ++i) {
            if (row_of(i) >= ROWS) {  // of whole warps only
                return;
            }
            Vec<Operand<KV>, 8> y;
            y.raw = x[i].bits;
            if (is_fp8<KV> || kind != KIND_OF<KV>) {
                float floats[8];
                x[i].to_floats(floats, kind);
                if constexpr (is_fp8<KV>) {
                    divide_by_largest(floats, tile.factor[row_of(i)]);
                }
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    y[e] = from_float<Operand<KV>>(floats[e]);
                }
            }
            store_vec(reinterpret_cast<char*>(&tile.x[row_of(i)][feat()]), y);
        }
    }

    // Divides a row by the power of two of its largest element: bfloat16 reaches beyond half, and
    // so nothing overflows. A power of two is exact, here and where scores are multiplied by it
    // again; what half rounds away is below 2^-24 of the largest.
    static __device__ __forceinline__ void divide_by_largest(float (&x)[8], float& factor) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            largest = fmaxf(largest, fabsf(x[i]));
        }
#pragma unroll
        for (int distance = CHUNKS / 2; distance > 0; distance /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
        }
        // 2^e <= largest < 2^(e + 1), kept where 2^e and 2^-e are both normal numbers
        const int bits = min(max(__float_as_int(largest) >> 23, 1), 253);
        const float inverse = __int_as_float((254 - bits) << 23);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] *= inverse;
        }
        factor = __int_as_float(bits << 23);  // the same from every lane of the row
    }
};

// Stores 2 or 4 elements as half, bfloat16 or float, whole if `to` is aligned to them.
template <int NUM>
__device__ __forceinline__ void store_elements(
    char* to, const float (&x)[NUM], int kind, bool aligned) {
    if (kind == KIND_FLOAT) {
        if (aligned) {
            Vec<float, NUM> y;
#pragma unroll
            for (int i = 0; i < NUM; ++i) {
                y[i] = x[i];
            }
            store_vec(to, y);
        } else {
#pragma unroll
            for (int i = 0; i < NUM; ++i) {
                reinterpret_cast<float*>(to)[i] = x[i];
            }
        }
        return;
    }
    Vec<uint32_t, NUM / 2> pairs;
#pragma unroll
    for (int i = 0; i < NUM / 2; ++i) {
        pairs[i] = kind == KIND_HALF ? cvt_pair<half>(x[2 * i], x[2 * i + 1])
                                     : cvt_pair<bfloat16>(x[2 * i], x[2 * i + 1]);
    }
    if (aligned) {
        store_vec(to, pairs);
    } else {
#pragma unroll
        for (int i = 0; i < NUM; ++i) {
            reinterpret_cast<uint16_t*>(to)[i] = pairs[i / 2] >> i % 2 * 16;
        }
    }
}

// What a row's sums are multiplied by, of its denominator; it is at least 1 if there are keys.
__device__ __forceinline__ float output_factor(float v_scale, float d) {
    return d > 0.0f ? __fdividef(v_scale, d) : 0.0f;
}

// What finishes a row: sums times `factor` are its output. Params: sinks, sinks_stride, sinks_kind,
// v_scale, o, o_rows, lse, lse_rows, levels.
template <typename Params>
struct RowResult {
    const Params& p;
    const PackedRow at;  // in o; of no row if negative
    float m, d;          // of all logits
    float factor;

    // Of a row's maximum and denominator. A sink is one more logit, without a value.
    __device__ __forceinline__
    RowResult(const Params& p, const PackedRow& row, float row_m, float row_d)
        : p(p), at(row.in(p.levels.o_rows)), m(row_m), d(row_d) {
        float scale = p.v_scale.get();
        if (p.sinks != nullptr) {
            const char* from = p.sinks + at.qo_head * p.sinks_stride;
            const float sink = LOG2_E * load_element(from, p.sinks_kind);
            const float m_new = fmaxf(m, sink);
            const float base = m_new > NO_KEY ? m_new : 0.0f;
            const float fade = ex2(m - base);
            scale *= fade;
            d = fmaf(d, fade, ex2(sink - base));
            m = m_new;
        }
        factor = output_factor(scale, d);
    }

    // Stores the outputs of four sums; adding 0 makes those of a row without keys +0.
    __device__ __forceinline__ void store(const float (&sums)[4], int feat) const {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = fmaf(sums[i], factor, 0.0f);
        }
        if (at.q_row >= 0) {
            char* to = p.o + p.o_rows.offset(at) + feat * element_bytes(p.o_rows.kind);
            store_elements(to, x, p.o_rows.kind, p.o_rows.aligned);
        }
    }

    // Where the row is in o; null: nowhere.
    __device__ __forceinline__ char* row() const {
        return at.q_row < 0 ? nullptr : p.o + p.o_rows.offset(at);
    }

    __device__ __forceinline__ void store_lse() const {
        if (p.lse != nullptr && at.q_row >= 0) {
            *reinterpret_cast<float*>(p.lse + p.lse_rows.offset(at)) = m + log2f(d);
        }
    }
};

}  // namespace cukv
