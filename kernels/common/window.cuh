// Windows: the first key of its request that a query sees.
//
// Usually it is window_left keys before the query's position. In the upper levels of a cascade,
// whose keys many requests share, queries of a tile stand at positions of their own: there it is
// read. Params: window_left, and first_seen, which is indexed by rows as items count them, or null.
#pragma once
#include "common/types.cuh"

namespace cukv {

// Of a call with a window.
template <typename Params>
__device__ __forceinline__ int32_t first_seen(const Params& p, int32_t q_row, int32_t position) {
    return p.first_seen != nullptr ? p.first_seen[q_row] : position - p.window_left;
}

// The least and the largest of queries [first_q, last_q] of a request, whose query 0 is row
// first_q_row of q and stands at position `diagonal`.
struct SeenFrom {
    int32_t least = 0x7fffffff;
    int32_t largest = 0;

    template <typename Params>
    __device__ __forceinline__ SeenFrom(
        const Params& p, int32_t first_q_row, int32_t diagonal, int32_t first_q, int32_t last_q) {
        if (p.window_left < 0) {
            least = 0;
        } else if (p.first_seen == nullptr) {
            least = diagonal + first_q - p.window_left;
            largest = diagonal + last_q - p.window_left;
        } else {
#pragma unroll 4
            for (int32_t q = first_q; q <= last_q; ++q) {
                const int32_t first = p.first_seen[first_q_row + q];
                least = min(least, first);
                largest = max(largest, first);
            }
        }
    }
};

}  // namespace cukv
