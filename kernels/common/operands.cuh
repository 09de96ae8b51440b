// Elements of a cache as operands of a tensor core, as ldmatrix gives them to lanes.
//
// fp8 becomes half, which holds it exactly. ldmatrix moves 16-bit units, so a lane gets two bytes
// of fp8 where it gets one element of 16 bits, and the order of columns differs:
//
//   keys    a lane's register is 4 neighbouring columns of a token, 4 t to 4 t + 3, where the
//           product wants 2 t, 2 t + 1 and 2 t + 8, 2 t + 9. A product over columns may take them
//           in any order if both sides do, so queries are read in this one.
//   values  a lane's register is columns 2 g and 2 g + 1 of two tokens. One product takes the even
//           columns of 16, the next the odd ones: the sums' tiles 2 i and 2 i + 1 alternate, until
//           `neighbours` puts them in order.
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

// The registers a of mma_m16n8k16.
struct LeftOperand {
    uint32_t a[4];
};

// Two right operands of 8 columns each as the left one of 16 rows: the same registers in another
// order.
__device__ __forceinline__ LeftOperand
as_left(const OperandPair& first, const OperandPair& second) {
    return {{first.b0, second.b0, first.b1, second.b1}};
}

// Where the row of 16 bytes begins that a lane gives ldmatrix. Of 16 x 16 elements of 16 bits, as
// four matrices of 8 x 8: those below each other first, or those beside each other. Of 32 x 16 of
// fp8, whose matrices are all below each other.
template <typename KV, int ROW_BYTES>
__device__ __forceinline__ int down_first() {
    const int lane_idx = threadIdx.x % WARP_SIZE;
    return is_fp8<KV> ? swizzled<ROW_BYTES>(lane_idx, 0)
                      : swizzled<ROW_BYTES>(lane_idx % 16, lane_idx / 16);
}

template <typename KV, int ROW_BYTES>
__device__ __forceinline__ int across_first() {
    const int lane_idx = threadIdx.x % WARP_SIZE;
    const int row = (lane_idx & 7) + (lane_idx >> 4) * 8, chunk = lane_idx >> 3 & 1;
    return is_fp8<KV> ? swizzled<ROW_BYTES>(lane_idx, 0) : swizzled<ROW_BYTES>(row, chunk);
}

// Two fp8 numbers, exactly, as a pair of halves.
template <typename KV>
__device__ __forceinline__ uint32_t halves_of(uint32_t two_bytes) {
    constexpr auto FORMAT = is_same<KV, fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
    const __half2_raw pair =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two_bytes), FORMAT);
    return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
}

// Four, as two pairs.
template <typename KV>
__device__ __forceinline__ OperandPair halves_of_four(uint32_t four_bytes) {
    uint16_t low, high;
    mov_halves(low, high, four_bytes);
    return {halves_of<KV>(low), halves_of<KV>(high)};
}

// 16 columns of TILES tiles of 8 keys, of one ldmatrix.
template <typename KV>
struct KeyOperands {
    static constexpr int TILES = is_fp8<KV> ? 4 : 2;
    uint32_t x[4];

    // What load() takes, of a buffer of keys: where they are a right operand's columns, or a left
    // one's rows.
    template <int ROW_BYTES>
    static __device__ __forceinline__ uint32_t address(uint32_t keys) {
        return keys + across_first<KV, ROW_BYTES>();
    }
    template <int ROW_BYTES>
    static __device__ __forceinline__ uint32_t left_address(uint32_t keys) {
        return keys + down_first<KV, ROW_BYTES>();
    }

    // Of keys [8 * tile, 8 * (tile + TILES)) and columns [16 * k_step, 16 * (k_step + 1)).
    template <int ROW_BYTES>
    __device__ __forceinline__ void load(uint32_t address, int tile, int k_step) {
        const int chunks = is_fp8<KV> ? k_step : 2 * k_step;
        ldmatrix_x4(x, rows_on<ROW_BYTES>(chunks_on(address, chunks), tile * 8));
    }

    __device__ __forceinline__ OperandPair operator[](int tile) const {
        if constexpr (is_fp8<KV>) {
            return halves_of_four<KV>(x[tile]);
        } else {
            return {x[2 * tile], x[2 * tile + 1]};
        }
    }

    // Tiles `tile` and the next, loaded from left_address().
    __device__ __forceinline__ LeftOperand left(int tile) const {
        if constexpr (is_fp8<KV>) {
            return as_left((*this)[tile], (*this)[tile + 1]);
        } else {
            return {{x[0], x[1], x[2], x[3]}};
        }
    }
};

// 16 columns, that is two tiles of 8, of TOKENS values, of one ldmatrix.
template <typename KV>
struct ValueOperands {
    static constexpr int TOKENS = is_fp8<KV> ? 32 : 16;
    uint32_t x[4];

    // What load() takes, of a buffer of values: as KeyOperands has it.
    template <int ROW_BYTES>
    static __device__ __forceinline__ uint32_t address(uint32_t values) {
        return values + down_first<KV, ROW_BYTES>();
    }
    template <int ROW_BYTES>
    static __device__ __forceinline__ uint32_t left_address(uint32_t values) {
        return values + across_first<KV, ROW_BYTES>();
    }

    // Of values [token, token + TOKENS) and columns [8 * tile, 8 * (tile + 2)).
    template <int ROW_BYTES>
    __device__ __forceinline__ void load(uint32_t address, int token, int tile) {
        const int chunks = is_fp8<KV> ? tile / 2 : tile;
        ldmatrix_x4_trans(x, rows_on<ROW_BYTES>(chunks_on(address, chunks), token));
    }

    // Of the j-th 16 tokens, for both tiles.
    __device__ __forceinline__ void get(int j, OperandPair& even, OperandPair& odd) const {
        if constexpr (is_fp8<KV>) {
            // Both tokens' even columns to the low half, the odd ones to the high half.
            const auto first = halves_of_four<KV>(__byte_perm(x[2 * j], 0, 0x3120));
            const auto second = halves_of_four<KV>(__byte_perm(x[2 * j + 1], 0, 0x3120));
            even = {first.b0, second.b0};
            odd = {first.b1, second.b1};
        } else {
            even = {x[0], x[1]};
            odd = {x[2], x[3]};
        }
    }

    // Of the j-th 16 tokens, loaded from left_address().
    __device__ __forceinline__ LeftOperand left(int j) const {
        if constexpr (is_fp8<KV>) {
            OperandPair even, odd;
            get(j, even, odd);
            return as_left(even, odd);
        } else {
            return {{x[0], x[1], x[2], x[3]}};
        }
    }
};

// Four neighbouring sums of a row out of its lanes' two each of tiles 2 i and 2 i + 1, and their
// first column, from column 16 i on.
template <typename KV>
__device__ __forceinline__ int neighbours(
    float (&sums)[4], const float* even, const float* odd, int t = threadIdx.x % 4) {
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

// The same of sums times `factor`, rounded: as two words, each exchanged whole. Adding 0 makes the
// results of a row without keys +0.
template <typename KV, typename TO>
__device__ __forceinline__ int neighbours(
    uint2& results, const float* even, const float* odd, float factor, int t) {
    float x[4] = {even[0], even[1], odd[0], odd[1]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[i] = fmaf(x[i], factor, 0.0f);
    }
    if constexpr (is_fp8<KV>) {
        results = make_uint2(cvt_pair<TO>(x[0], x[2]), cvt_pair<TO>(x[1], x[3]));
        return 4 * t;
    } else {
        const bool low = t % 2 == 0;
        const uint32_t of_even = cvt_pair<TO>(x[0], x[1]), of_odd = cvt_pair<TO>(x[2], x[3]);
        const uint32_t other = __shfl_xor_sync(0xffffffffu, low ? of_odd : of_even, 1);
        results = low ? make_uint2(of_even, other) : make_uint2(other, of_odd);
        return low ? 2 * t : 8 + 2 * (t - 1);
    }
}

}  // namespace cukv
