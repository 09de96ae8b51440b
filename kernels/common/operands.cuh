// Elements of a cache as the right operand of a tensor core, as ldmatrix gives them to lanes.
//
// fp8 becomes half, which holds it exactly. ldmatrix moves 16-bit units, so a lane gets two bytes
// of fp8 where it gets one element of 16 bits, and the order of columns differs:
//
//   keys    a lane's register is 4 neighbouring columns of a token, 4 t to 4 t + 3, where the
//           product wants 2 t, 2 t + 1 and 2 t + 8, 2 t + 9. A product over columns may take them
//           in any order if both sides do, so queries are read in this one (load_fragment).
//   values  a lane's register is columns 2 g and 2 g + 1 of two tokens. One product takes the even
//           columns of 16, the next the odd ones: the sums' tiles 2 i and 2 i + 1 alternate, until
//           store_tile_pair puts them in order.
#pragma once
#include "common/swizzle.cuh"

namespace cukv {

template <typename KV>
using Operand = typename Select<is_fp8<KV>, half, KV>::type;

// The two registers b of mma_m16n8k16.
struct OperandPair {
    uint32_t b0;
    uint32_t b1;
};

// Two fp8 numbers, exactly, as a pair of halves.
template <typename KV>
__device__ __forceinline__ uint32_t halves_of(uint32_t two_bytes) {
    constexpr auto FORMAT = is_same<KV, fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
    const __half2_raw pair =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two_bytes), FORMAT);
    return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
}

// 16 columns of TILES tiles of 8 keys, of one ldmatrix.
template <typename KV>
struct KeyOperands {
    static constexpr int TILES = is_fp8<KV> ? 4 : 2;
    uint32_t x[4];

    // Of keys [8 * tile, 8 * (tile + TILES)) and columns [16 * k_step, 16 * (k_step + 1)).
    template <int ROW_BYTES>
    __device__ __forceinline__ void load(uint32_t keys, int tile, int k_step) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        if constexpr (is_fp8<KV>) {
            ldmatrix_x4(x, keys + swizzled<ROW_BYTES>(tile * 8 + lane_idx, k_step));
        } else {
            const int row = tile * 8 + (lane_idx & 7) + (lane_idx >> 4) * 8;
            const int chunk = 2 * k_step + (lane_idx >> 3 & 1);
            ldmatrix_x4(x, keys + swizzled<ROW_BYTES>(row, chunk));
        }
    }

    __device__ __forceinline__ OperandPair operator[](int tile) const {
        if constexpr (is_fp8<KV>) {
            return {halves_of<KV>(x[tile] & 0xffffu), halves_of<KV>(x[tile] >> 16)};
        } else {
            return {x[2 * tile], x[2 * tile + 1]};
        }
    }
};

// 16 columns, that is two tiles of 8, of TOKENS values, of one ldmatrix.
template <typename KV>
struct ValueOperands {
    static constexpr int TOKENS = is_fp8<KV> ? 32 : 16;
    uint32_t x[4];

    // Of values [token, token + TOKENS) and columns [8 * tile, 8 * (tile + 2)).
    template <int ROW_BYTES>
    __device__ __forceinline__ void load(uint32_t values, int token, int tile) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        if constexpr (is_fp8<KV>) {
            ldmatrix_x4_trans(x, values + swizzled<ROW_BYTES>(token + lane_idx, tile / 2));
        } else {
            const int row = token + lane_idx % 16;
            const int chunk = tile + lane_idx / 16;
            ldmatrix_x4_trans(x, values + swizzled<ROW_BYTES>(row, chunk));
        }
    }

    // Of the j-th 16 tokens, for both tiles.
    __device__ __forceinline__ void get(int j, OperandPair& even, OperandPair& odd) const {
        if constexpr (is_fp8<KV>) {
            // Both tokens' even columns to the low half, the odd ones to the high half.
            const uint32_t low = __byte_perm(x[2 * j], 0, 0x3120);
            const uint32_t high = __byte_perm(x[2 * j + 1], 0, 0x3120);
            even = {halves_of<KV>(low & 0xffffu), halves_of<KV>(high & 0xffffu)};
            odd = {halves_of<KV>(low >> 16), halves_of<KV>(high >> 16)};
        } else {
            even = {x[0], x[1]};
            odd = {x[2], x[3]};
        }
    }
};

// Stores a row's two sums each of tiles 2 i and 2 i + 1; `to` is column 16 i of the row.
template <typename KV>
__device__ __forceinline__ void store_tile_pair(float* to, const float* even, const float* odd) {
    const int t = threadIdx.x % 4;
    if constexpr (is_fp8<KV>) {
        *reinterpret_cast<float4*>(to + 4 * t) = make_float4(even[0], odd[0], even[1], odd[1]);
    } else {
        *reinterpret_cast<float2*>(to + 2 * t) = make_float2(even[0], even[1]);
        *reinterpret_cast<float2*>(to + 2 * t + 8) = make_float2(odd[0], odd[1]);
    }
}

// Four neighbouring sums of a row out of its lanes' two each of tiles 2 i and 2 i + 1, and their
// first column, from column 16 i on.
template <typename KV>
__device__ __forceinline__ int neighbours(float (&sums)[4], const float* even, const float* odd) {
    const int t = threadIdx.x % 4;
    if constexpr (is_fp8<KV>) {
        sums[0] = even[0], sums[1] = odd[0], sums[2] = even[1], sums[3] = odd[1];
        return 4 * t;
    } else {
        // A lane of even t takes four columns of the even tile, its neighbour of the odd one.
        const bool low = t % 2 == 0;
        const float x0 = __shfl_xor_sync(0xffffffffu, low ? odd[0] : even[0], 1);
        const float x1 = __shfl_xor_sync(0xffffffffu, low ? odd[1] : even[1], 1);
        sums[0] = low ? even[0] : x0, sums[1] = low ? even[1] : x1;
        sums[2] = low ? x0 : odd[0], sums[3] = low ? x1 : odd[1];
        return low ? 2 * t : 8 + 2 * (t - 1);
    }
}

}  // namespace cukv
