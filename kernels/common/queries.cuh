// Query rows in, results out: elements of a dtype that is known at run time only.
#pragma once
#include "common/ptx.cuh"
#include "common/softmax.cuh"

namespace cukv {

constexpr float LOG2_E = 1.44269504f;

// Dtypes by number. Queries and results are a small part of the bytes, so that a kernel for each
// pair of dtypes would only take longer to compile.
constexpr int KIND_HALF = 0, KIND_BFLOAT16 = 1, KIND_FLOAT = 2, KIND_E4M3 = 3, KIND_E5M2 = 4;

// Query rows and results: [rows, num_qo_heads, ...], strides in bytes.
struct QueryRows {
    int64_t row_stride;
    int64_t head_stride;
    int32_t kind;     // of element: KIND_*
    int32_t aligned;  // 1: vectors of 16 bytes (q) or of 4 elements (o) may be moved whole
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
            for (int i = 0; i < 16; ++i) {
                const uint32_t byte = i < num_bytes ? static_cast<uint8_t>(from[i]) : 0;
                words[0] = i < 4 ? words[0] | byte << 8 * i : words[0];
                words[1] = i / 4 == 1 ? words[1] | byte << 8 * (i - 4) : words[1];
                words[2] = i / 4 == 2 ? words[2] | byte << 8 * (i - 8) : words[2];
                words[3] = i / 4 == 3 ? words[3] | byte << 8 * (i - 12) : words[3];
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

// Stores the finished vector of a state, times `factor`, as half, bfloat16 or float, whole if `to`
// is aligned to four elements.
__device__ __forceinline__ void
store_4(char* to, const State<1, 4>& state, float factor, int kind, bool aligned) {
    const Vec<float, 4> x = state.result<float>(0, factor);
    if (kind == KIND_FLOAT) {
        if (aligned) {
            store_vec(to, x);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                reinterpret_cast<float*>(to)[i] = x[i];
            }
        }
        return;
    }
    const bool is_half = kind == KIND_HALF;
    const uint2 pairs =
        is_half ? make_uint2(cvt_pair<half>(x[0], x[1]), cvt_pair<half>(x[2], x[3]))
                : make_uint2(cvt_pair<bfloat16>(x[0], x[1]), cvt_pair<bfloat16>(x[2], x[3]));
    if (aligned) {
        *reinterpret_cast<uint2*>(to) = pairs;
    } else {
        uint16_t* elements = reinterpret_cast<uint16_t*>(to);
        elements[0] = pairs.x;
        elements[1] = pairs.x >> 16;
        elements[2] = pairs.y;
        elements[3] = pairs.y >> 16;
    }
}

}  // namespace cukv
