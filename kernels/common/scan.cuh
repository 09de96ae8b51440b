// Prefix sums by one CTA: what turns lengths into an indptr.
#pragma once
#include "common/index.cuh"

namespace cukv {

constexpr int SCAN_THREADS = 1024;

struct ScanSmem {
    int64_t warp_sums[SCAN_THREADS / WARP_SIZE];
};

__device__ __forceinline__ int64_t warp_inclusive_sum(int64_t x) {
    const int lane_idx = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
        const int64_t other = __shfl_up_sync(0xffffffffu, x, distance);
        x += lane_idx >= distance ? other : 0;
    }
    return x;
}

// out[0] = 0, out[i + 1] = out[i] + length(i). One CTA of SCAN_THREADS threads; a round of the
// loop takes one length from each thread, so neighbouring threads read neighbouring entries.
template <typename Length>
__device__ __forceinline__ void prefix_sum(
    const Index& out, int64_t size, ScanSmem& smem, Length length) {
    const int warp_idx = threadIdx.x / WARP_SIZE, lane_idx = threadIdx.x % WARP_SIZE;
    int64_t total = 0;
    if (threadIdx.x == 0) {
        out.store(0, 0);
    }
    for (int64_t base = 0; base < size; base += SCAN_THREADS) {
        const int64_t i = base + threadIdx.x;
        const int64_t in_warp = warp_inclusive_sum(i < size ? length(i) : 0);
        if (lane_idx == WARP_SIZE - 1) {
            smem.warp_sums[warp_idx] = in_warp;
        }
        __syncthreads();  // all sums of this round are in warp_sums
        const int64_t sums = warp_inclusive_sum(smem.warp_sums[lane_idx]);
        const int64_t before = warp_idx == 0 ? 0 : __shfl_sync(0xffffffffu, sums, warp_idx - 1);
        if (i < size) {
            out.store(i + 1, total + before + in_warp);
        }
        total += __shfl_sync(0xffffffffu, sums, WARP_SIZE - 1);
        __syncthreads();  // warp_sums has been read: the next round may write it
    }
}

}  // namespace cukv
