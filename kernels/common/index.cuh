// Index arrays: int32 or int64, any stride, read through one accessor and never reinterpreted.
#pragma once
#include "common/types.cuh"

namespace cukv {

struct Index;

// An entry as it was loaded. Making the value of it is what waits for the load.
struct IndexEntry {
    int32_t low;
    int32_t high;

    __device__ __forceinline__ int64_t value(const Index& array) const;
};

struct Index {
    const void* data;
    int64_t stride;  // bytes from one entry to the next, may be negative
    int64_t size;    // entries
    int64_t width;   // bytes of an entry: 4 or 8; 0 = no array was given

    __device__ __forceinline__ bool given() const { return width != 0; }

    __device__ __forceinline__ int64_t operator[](int64_t i) const {
        const char* entry = static_cast<const char*>(data) + i * stride;
        return width == 4 ? *reinterpret_cast<const int32_t*>(entry)
                          : *reinterpret_cast<const int64_t*>(entry);
    }

    // Starts loading entry i; where no array is given, entry i is i.
    __device__ __forceinline__ IndexEntry entry(int64_t i) const {
        const int32_t* words =
            reinterpret_cast<const int32_t*>(static_cast<const char*>(data) + i * stride);
        return {given() ? words[0] : static_cast<int32_t>(i), width == 8 ? words[1] : 0};
    }

    __device__ __forceinline__ void store(int64_t i, int64_t value) const {
        char* entry = static_cast<char*>(const_cast<void*>(data)) + i * stride;
        if (width == 4) {
            *reinterpret_cast<int32_t*>(entry) = static_cast<int32_t>(value);
        } else {
            *reinterpret_cast<int64_t*>(entry) = value;
        }
    }
};

__device__ __forceinline__ int64_t IndexEntry::value(const Index& array) const {
    const uint64_t wide = static_cast<uint64_t>(high) << 32 | static_cast<uint32_t>(low);
    return array.width == 8 ? static_cast<int64_t>(wide) : low;
}

// First i in [0, size] with indptr[i] > value (size if there is none), by one thread.
__device__ __forceinline__ int64_t upper_bound(const Index& indptr, int64_t size, int64_t value) {
    int64_t low = 0, high = size;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (indptr[middle] > value) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// The same, by a whole warp: 32 probes a round, so 300,000 entries take 4 rounds of one load each.
__device__ __forceinline__ int64_t
warp_upper_bound(const Index& indptr, int64_t size, int64_t value) {
    const int lane_idx = threadIdx.x % WARP_SIZE;
    int64_t low = 0, high = size;  // the answer is in [low, high]
    while (low < high) {
        const int64_t step = (high - low + WARP_SIZE - 1) / WARP_SIZE;
        const int64_t probe = low + (lane_idx + 1) * step - 1;
        const bool above = probe >= high || indptr[probe] > value;
        const uint32_t lanes = __ballot_sync(0xffffffffu, above);
        const int below = lanes == 0 ? WARP_SIZE : __ffs(lanes) - 1;
        const int64_t last = low + (below + 1) * step - 1;  // entry of the first lane above
        low += below * step;
        high = last < high ? last : high;
    }
    return low;
}

}  // namespace cukv
