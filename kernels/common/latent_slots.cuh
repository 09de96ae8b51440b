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

template <int ROWS, int FEATS>
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

    // The first column of a vector's first four sums; the others are 16 columns further.
    static __device__ __forceinline__ int feat(int vec) { return vec / 4 * 32 + vec % 4 * 4; }

    // Stores a stretch of a row, by the four lanes that have it: each_vector(visit) calls
    // visit(sums, feat) for vectors of four sums, every other of them 16 columns behind the one
    // before. `largest` of a lane's magnitudes.
    template <typename EachVector>
    __device__ __forceinline__ void store(
        int row_idx, int stretch, float largest, EachVector each_vector) const {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        // Biased exponents: both the unit and its inverse are normal numbers.
        const uint32_t exponent = max(__float_as_uint(largest) >> 23, 15u);
        const float inverse = __uint_as_float(2 * 127 + 14 - exponent << 23);
        float* to = row(slots.item.item_idx, row_idx);
        uint32_t pairs[4];
        int num_pairs = 0;
        each_vector([&](const float (&sums)[4], int feat) {
            pairs[num_pairs++] = cvt_pair<half>(sums[0] * inverse, sums[1] * inverse);
            pairs[num_pairs++] = cvt_pair<half>(sums[2] * inverse, sums[3] * inverse);
            if (num_pairs == 4) {
                __stcg(
                    vecs(to) + feat / 32 * 4 + feat % 16 / 4,
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
                num_pairs = 0;
            }
        });
        if (threadIdx.x % 4 == 0) {
            units(to)[stretch] = __uint_as_float(exponent - 14 << 23);
        }
    }
};

}  // namespace cukv
