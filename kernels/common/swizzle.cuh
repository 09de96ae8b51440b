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

// From the address of a chunk of a row to that of `chunks` further along the row. Any bit of
// `chunks` must be 0 in the chunk's own number: then the xor is with a constant, where the two are
// added up.
__device__ __forceinline__ uint32_t chunks_on(uint32_t address, int chunks) {
    return (address ^ (chunks & 7) << 4) + (chunks >> 3) * 1024;
}

// The same to `rows` further down, if their bits are 0 in the row's number.
template <int ROW_BYTES>
__device__ __forceinline__ uint32_t rows_on(uint32_t address, int rows) {
    return (address ^ (rows & 7) << 4) + (rows >> 3) * (8 * ROW_BYTES) + (rows & 7) * 128;
}

// Zeros all of a warp's buffers, by the warp.
template <int STAGES, int BYTES>
__device__ __forceinline__ void zero_buffers(char (&buffers)[STAGES][BYTES]) {
    for (int i = threadIdx.x % WARP_SIZE * 16; i < STAGES * BYTES; i += WARP_SIZE * 16) {
        *reinterpret_cast<uint4*>(buffers[0] + i) = uint4{};
    }
    __syncwarp();  // every lane's copies come after
}

// Starts copying row r of TOKENS, which begins at rows[r], to row r of a buffer, by a warp. A row
// whose bit of `keys` is 0 becomes zeros and is not read; ALL says that no bit is 0.
template <int ROW_BYTES, bool ALL, int TOKENS>
__device__ __forceinline__ void copy_rows(
    char* buffer,
    const char* const (&rows)[TOKENS],
    int num_bytes,
    uint32_t keys,
    uint64_t policy) {
    constexpr int LANES = ROW_BYTES < 512 ? ROW_BYTES / 16 : WARP_SIZE;  // of a row
    constexpr int ROWS_AT_ONCE = WARP_SIZE / LANES;
    static_assert(WARP_SIZE % LANES == 0, "lanes share rows evenly");
    static_assert(ROW_BYTES % (LANES * 16) == 0, "a lane has as many chunks as any other");
    const int lane_idx = tid_x() % WARP_SIZE;
    const int first = lane_idx / LANES, chunk = lane_idx % LANES;
    const uint32_t to = smem_address(buffer) + swizzled<ROW_BYTES>(first, chunk);
    // Look-ups apart from copies, each of which would have to wait for the look-up before it: they
    // go to shared memory both.
    constexpr int NUM = TOKENS / ROWS_AT_ONCE, BATCH = NUM < 8 ? NUM : 8;
#pragma unroll
    for (int base = 0; base < TOKENS; base += BATCH * ROWS_AT_ONCE) {
        const char* from[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            from[i] = rows[base + i * ROWS_AT_ONCE + first] + chunk * 16;
        }
#pragma unroll
        for (int chunks = 0; chunks < ROW_BYTES / 16; chunks += LANES) {
            if ((chunk + chunks) * 16 >= num_bytes) {
                break;
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int row = base + i * ROWS_AT_ONCE;
                const int src_bytes = ALL || (keys >> (row + first) & 1) != 0 ? 16 : 0;
                cp_async_16(
                    chunks_on(rows_on<ROW_BYTES>(to, row), chunks), from[i] + chunks * 16,
                    src_bytes, policy);
            }
        }
    }
}

// The same for rows that are not aligned to 16 bytes; done when it returns.
template <typename KV, int ROW_BYTES, int TOKENS>
__device__ __forceinline__ void copy_elements(
    char* buffer, const char* const (&rows)[TOKENS], int head_dim, uint32_t keys) {
    const int lane_idx = threadIdx.x % WARP_SIZE;
    for (int row = 0; row < TOKENS; ++row) {
        const KV* from = reinterpret_cast<const KV*>(rows[row]);
        for (int feat = lane_idx; feat < head_dim; feat += WARP_SIZE) {
            const int byte = feat * sizeof(KV);
            char* to = buffer + swizzled<ROW_BYTES>(row, byte / 16) + byte % 16;
            *reinterpret_cast<KV*>(to) = keys >> row & 1 ? from[feat] : KV(0.0f);
        }
    }
}

}  // namespace cukv
