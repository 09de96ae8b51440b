// Integer and element types, 16-byte vectors, and the conversions between element types.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace cukv {

// NVRTC has no <cstdint>; these are what CUDA's own headers mean by the names.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

using bfloat16 = __nv_bfloat16;
using fp8_e4m3 = __nv_fp8_e4m3;
using fp8_e5m2 = __nv_fp8_e5m2;

constexpr int WARP_SIZE = 32;

template <typename A, typename B>
constexpr bool is_same = false;
template <typename A>
constexpr bool is_same<A, A> = true;

template <bool CONDITION, typename A, typename B>
struct Select {
    using type = A;
};
template <typename A, typename B>
struct Select<false, A, B> {
    using type = B;
};

template <typename DType>
constexpr bool is_fp8 = is_same<DType, fp8_e4m3> || is_same<DType, fp8_e5m2>;

template <int BYTES>
struct UintOf;
template <>
struct UintOf<8> {
    using type = uint64_t;
};
template <>
struct UintOf<4> {
    using type = uint32_t;
};
template <>
struct UintOf<2> {
    using type = uint16_t;
};
template <>
struct UintOf<1> {
    using type = uint8_t;
};

template <int BYTES>
struct RawOf;
template <>
struct RawOf<16> {
    using type = uint4;
};
template <>
struct RawOf<8> {
    using type = uint2;
};
template <>
struct RawOf<4> {
    using type = uint32_t;
};
template <>
struct RawOf<2> {
    using type = uint16_t;
};
template <>
struct RawOf<1> {
    using type = uint8_t;
};

// SIZE consecutive elements of 16 bytes or fewer, moved by one instruction. They are held as one
// raw value, so that a plain copy never takes elements apart.
template <typename DType, int SIZE>
struct Vec {
    using Raw = typename RawOf<SIZE * sizeof(DType)>::type;
    Raw raw;

    __device__ __forceinline__ DType& operator[](int i) {
        return reinterpret_cast<DType*>(&raw)[i];
    }
    __device__ __forceinline__ const DType& operator[](int i) const {
        return reinterpret_cast<const DType*>(&raw)[i];
    }
};

template <typename DType, int SIZE>
__device__ __forceinline__ Vec<DType, SIZE> load_vec(const char* from) {
    return {*reinterpret_cast<const typename Vec<DType, SIZE>::Raw*>(from)};
}

template <typename DType, int SIZE>
__device__ __forceinline__ void store_vec(char* to, const Vec<DType, SIZE>& x) {
    *reinterpret_cast<typename Vec<DType, SIZE>::Raw*>(to) = x.raw;
}

// The same past the L1, for data that this SM does not touch again.
template <typename DType, int SIZE>
__device__ __forceinline__ Vec<DType, SIZE> load_vec_cg(const char* from) {
    return {__ldcg(reinterpret_cast<const typename Vec<DType, SIZE>::Raw*>(from))};
}

template <typename DType, int SIZE>
__device__ __forceinline__ void store_vec_cg(char* to, const Vec<DType, SIZE>& x) {
    __stcg(reinterpret_cast<typename Vec<DType, SIZE>::Raw*>(to), x.raw);
}

// Loads through the read-only path: for data that no other thread writes during the launch, and
// this one only after it has read it.
template <typename DType, int SIZE>
__device__ __forceinline__ Vec<DType, SIZE> load_vec_read_only(const char* from) {
    return {__ldg(reinterpret_cast<const typename Vec<DType, SIZE>::Raw*>(from))};
}

// Division by a number that the host knows, exact for n below 2^31.
struct Divisor {
    uint32_t divisor;
    uint32_t magic;
    uint32_t shift;

    __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
        return __umulhi(2 * n, magic) >> shift;
    }
};

template <typename DType>
__device__ __forceinline__ float to_float(DType x) {
    return static_cast<float>(x);
}

// Rounds to nearest even; fp8 saturates to the largest finite value and keeps NaN.
template <typename DType>
__device__ __forceinline__ DType from_float(float x) {
    if constexpr (is_same<DType, half>) {
        return __float2half_rn(x);
    } else if constexpr (is_same<DType, bfloat16>) {
        return __float2bfloat16_rn(x);
    } else {
        return DType(x);
    }
}

// A scale given as a number, or as one float on the device that only the kernel reads.
struct Scale {
    const float* device;  // null: use `value`
    float value;

    __device__ __forceinline__ float get() const { return device != nullptr ? *device : value; }
};

}  // namespace cukv
