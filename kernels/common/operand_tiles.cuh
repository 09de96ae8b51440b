// Tiles of rows in shared memory as a warpgroup's products read them.
//
// Rows are swizzled as common/swizzle.cuh says, 64 columns (128 bytes) at a time. Where 8 rows of
// all columns lie together, that is its layout; a tile that one copy brings has all rows of 64
// columns together instead.
#pragma once
#include "common/ptx_sm90.cuh"
#include "common/swizzle.cuh"

namespace cukv {

constexpr int SWIZZLED_COLUMNS = 64;  // of 16-bit elements

template <int ROWS, int COLUMNS_, bool GROUPED>
struct OperandTile {
    static constexpr int COLUMNS = COLUMNS_;
    static_assert(COLUMNS % SWIZZLED_COLUMNS == 0, "columns are swizzled 64 at a time");
    static constexpr int BYTES = ROWS * COLUMNS * 2;
    static constexpr int GROUP_BYTES = GROUPED ? COLUMNS / 64 * 1024 : 1024;  // to the next 8 rows
    static constexpr int SPAN_BYTES = GROUPED ? 1024 : ROWS * 128;  // to the next 64 columns

    // Bytes from the tile to 64 columns of a row, whose chunks are swizzled among themselves.
    static __device__ __forceinline__ int span(int row, int span_idx) {
        return (row >> 3) * GROUP_BYTES + span_idx * SPAN_BYTES + (row & 7) * 128;
    }

    // Bytes from the tile to a 16-byte chunk of a row.
    static __device__ __forceinline__ int offset(int row, int chunk) {
        return span(row, chunk >> 3) + (((chunk ^ row) & 7) << 4);
    }

    // The tile's descriptor. Addresses in it are in units of 16 bytes; a cluster's shared memory
    // has longer addresses than the field.
    static __device__ __forceinline__ uint64_t descriptor(uint32_t tile) {
        constexpr uint64_t SWIZZLE_128 = uint64_t{1} << 62;
        return SWIZZLE_128 | uint64_t{GROUP_BYTES >> 4} << 32 | uint64_t{SPAN_BYTES >> 4} << 16 |
               (tile & 0x3ffffu) >> 4;
    }

    // From a descriptor to that of columns [16 * k_step, 16 * (k_step + 1)), over which a product
    // sums.
    static constexpr __device__ __forceinline__ int columns(int k_step) {
        return (k_step / 4 * SPAN_BYTES + k_step % 4 * 32) >> 4;
    }

    // From a descriptor to that of rows [16 * k_step, 16 * (k_step + 1)), over which a product
    // sums.
    static constexpr __device__ __forceinline__ int rows(int k_step) {
        return k_step * 2 * GROUP_BYTES >> 4;
    }
};

// A place in a ring of buffers, and the parity of the phase that it is in.
template <int STAGES>
struct RingPlace {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

}  // namespace cukv
