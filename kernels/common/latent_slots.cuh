// Sums in slots (common/slots.cuh) of tiles of latent rows: halves, since what a slot costs is its
// bytes on their way to the L2 and back.
//
// A row's sums come in stretches of FEATS columns, as they are added up, in units of a power of two
// of their own: the largest is between 2^14 and 2^15. So whatever the size of values, a sum is
// rounded no more than half rounds, and a weight before it by as much or by more.
// A row takes half of the room that its floats would: [HEAD_DIM_CKV] halves, [STRETCHES] float32
// units.
#pragma once
#include "common/latent.cuh"
#include "common/slots.cuh"

namespace cukv {

template <typename KV, int ROWS, int FEATS>
struct LatentSlots {
    static constexpr int STRETCHES = HEAD_DIM_CKV / FEATS;  // of a row
    static constexpr int STRETCH_VECS = FEATS / 8;          // vectors of eight sums
    static constexpr int VECS = HEAD_DIM_CKV / 8;           // of a row
    static constexpr int NUM_STRETCHES = ROWS * STRETCHES;  // of a slot
    static constexpr int FLOATS = ROWS * HEAD_DIM_CKV;      // of a slot

    Slots<ROWS, HEAD_DIM_CKV> slots;

    // A row of the tile's i-th item.
    __device__ __forceinline__ float* row(int32_t i, int row) const {
        return slots.work.sums + slots.slot_row(i, row) * HEAD_DIM_CKV;
    }

    static __device__ __forceinline__ uint4* vecs(float* row) {
        return reinterpret_cast<uint4*>(row);
    }

    static __device__ __forceinline__ float* units(float* row) { return row + HEAD_DIM_CKV / 2; }

    // A vector is of one lane, 2 sums of each of 4 tiles of 8 columns (common/products.cuh), in
    // pairs of neighbouring columns: the first column of a pair.
    static __device__ __forceinline__ int feat(int vec, int pair) {
        const int t = vec % 4;
        return vec / 4 * 32 +
               (is_fp8<KV> ? pair / 2 * 16 + 4 * t + pair % 2 * 2 : pair * 8 + 2 * t);
    }

    // Stores a stretch of a row, by the four lanes that have it: sum(tile, i) is a lane's sum of
    // column i of its two of a tile.
    template <typename Sum>
    __device__ __forceinline__ void store(int row_idx, int stretch, Sum sum) const {
        float largest = 0.0f;
#pragma unroll
        for (int tile = 0; tile < FEATS / 8; ++tile) {
            largest = fmaxf(largest, fmaxf(fabsf(sum(tile, 0)), fabsf(sum(tile, 1))));
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        // Biased exponents: both the unit and its inverse are normal numbers.
        const uint32_t exponent = max(__float_as_uint(largest) >> 23, 15u);
        const float inverse = __uint_as_float(2 * 127 + 14 - exponent << 23);
        float* to = row(slots.item.item_idx, row_idx);
        uint4* own = vecs(to) + stretch * STRETCH_VECS + tid_x() % 4;
#pragma unroll
        for (int tile = 0; tile < FEATS / 8; tile += 4) {
            uint32_t pairs[4];
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                // Tiles of fp8 alternate by columns.
                const int first = tile + pair / 2 * 2;
                const float low = is_fp8<KV> ? sum(first, pair % 2) : sum(tile + pair, 0);
                const float high = is_fp8<KV> ? sum(first + 1, pair % 2) : sum(tile + pair, 1);
                pairs[pair] = cvt_pair<half>(low * inverse, high * inverse);
            }
            __stcg(own + tile, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
        }
        if (threadIdx.x % 4 == 0) {
            units(to)[stretch] = __uint_as_float(exponent - 14 << 23);
        }
    }
};

}  // namespace cukv
