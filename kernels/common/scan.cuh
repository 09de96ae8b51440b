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

// Sum of x over the threads before this one; `total` becomes the sum over all. Every thread of the
// CTA, of whole warps up to SCAN_THREADS threads, comes here.
__device__ __forceinline__ int64_t cta_exclusive_sum(ScanSmem& smem, int64_t x, int64_t& total) {
    const int warp_idx = threadIdx.x / WARP_SIZE, lane_idx = threadIdx.x % WARP_SIZE;
    const int64_t in_warp = warp_inclusive_sum(x);
    __syncthreads();  // warp_sums of the last call have been read
    if (lane_idx == WARP_SIZE - 1) {
        smem.warp_sums[warp_idx] = in_warp;
    }
    __syncthreads();  // all sums of this call are in warp_sums
    const bool is_warp = lane_idx < blockDim.x / WARP_SIZE;
    const int64_t sums = warp_inclusive_sum(is_warp ? smem.warp_sums[lane_idx] : 0);
    const int64_t before = warp_idx == 0 ? 0 : __shfl_sync(0xffffffffu, sums, warp_idx - 1);
    total = __shfl_sync(0xffffffffu, sums, WARP_SIZE - 1);
    return before + in_warp - x;
}

// out[0] = 0, out[i + 1] = out[i] + length(i). One CTA of SCAN_THREADS threads; a round of the
// loop takes one length from each thread, so neighbouring threads read neighbouring entries.
template <typename Length>
__device__ __forceinline__ void prefix_sum(
    const Index& out, int64_t size, ScanSmem& smem, Length length) {
    int64_t sum = 0;
    if (threadIdx.x == 0) {
        out.store(0, 0);
    }
    for (int64_t base = 0; base < size; base += SCAN_THREADS) {
        const int64_t i = base + threadIdx.x;
        const int64_t x = i < size ? length(i) : 0;
        int64_t total;
        const int64_t before = cta_exclusive_sum(smem, x, total);
        if (i < size) {
            out.store(i + 1, sum + before + x);
        }
        sum += total;
    }
}

}  // namespace cukv
