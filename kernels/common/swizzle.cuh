// Buffers of key or value rows in shared memory, and rows of pages copied into them.
//
//   byte of 16-byte chunk c of row r = r / 8 * 8 * ROW_BYTES + c / 8 * 1024 + r % 8 * 128
//                                      + (c ^ r) % 8 * 16
//
// 128 bytes are every bank once. ldmatrix reads one chunk of 8 consecutive rows at a time: without
// the xor they lie in the same four banks, with it in all. A copy writes the 8 chunks of 128 bytes
// of a row, which are every bank once too.
#pragma once
#include "common/ptx.cuh"

namespace cukv {

template <int ROW_BYTES>
__device__ __forceinline__ int swizzled(int row, int chunk) {
    static_assert(ROW_BYTES % 128 == 0, "a row is swizzled 128 bytes at a time");
    return (row >> 3) * (8 * ROW_BYTES) + (chunk >> 3) * 1024 + (row & 7) * 128 +
           (((chunk ^ row) & 7) << 4);
}

// Zeros all of a warp's buffers, by the warp.
template <int STAGES, int BYTES>
__device__ __forceinline__ void zero_buffers(char (&buffers)[STAGES][BYTES]) {
    for (int i = threadIdx.x % WARP_SIZE * 16; i < STAGES * BYTES; i += WARP_SIZE * 16) {
        *reinterpret_cast<uint4*>(buffers[0] + i) = uint4{};
    }
    __syncwarp();  // every lane's copies come after
}

// Starts copying row r of TOKENS to row r of a buffer, by a warp; lane r knows that the row is
// `offset` bytes from `base`. A row whose bit of `keys` is 0 becomes zeros and is not read.
template <int ROW_BYTES, int TOKENS, int UNROLL>
__device__ __forceinline__ void copy_rows(
    char* buffer, const char* base, int64_t offset, int num_bytes, uint32_t keys, uint64_t policy) {
    constexpr int LANES = ROW_BYTES < 512 ? ROW_BYTES / 16 : WARP_SIZE;  // of a row
    constexpr int ROWS_AT_ONCE = WARP_SIZE / LANES;
    static_assert(ROW_BYTES <= 512 && WARP_SIZE % LANES == 0, "lanes share rows evenly");
    const int lane_idx = threadIdx.x % WARP_SIZE;
    const int chunk = lane_idx % LANES;
    const bool loads = chunk * 16 < num_bytes;
    const uint32_t to = smem_address(buffer);
#pragma unroll(UNROLL)
    for (int i = 0; i < TOKENS; i += ROWS_AT_ONCE) {
        const int row = i + lane_idx / LANES;
        const int64_t row_offset = __shfl_sync(0xffffffffu, offset, row);
        if (loads) {
            cp_async_16(
                to + swizzled<ROW_BYTES>(row, chunk), base + row_offset + chunk * 16,
                (keys >> row & 1) * 16, policy);
        }
    }
}

// The same for rows that are not aligned to 16 bytes; done when it returns.
template <typename KV, int ROW_BYTES, int TOKENS>
__device__ __forceinline__ void copy_elements(
    char* buffer, const char* base, int64_t offset, int head_dim, uint32_t keys) {
    const int lane_idx = threadIdx.x % WARP_SIZE;
    for (int row = 0; row < TOKENS; ++row) {
        const int64_t row_offset = __shfl_sync(0xffffffffu, offset, row);
        const KV* from = reinterpret_cast<const KV*>(base + row_offset);
        for (int feat = lane_idx; feat < head_dim; feat += WARP_SIZE) {
            const int byte = feat * sizeof(KV);
            char* to = buffer + swizzled<ROW_BYTES>(row, byte / 16) + byte % 16;
            *reinterpret_cast<KV*>(to) = keys >> row & 1 ? from[feat] : KV(0.0f);
        }
    }
}

}  // namespace cukv
