// Truth values -> bits: one warp makes a tile of bits, each lane 32 of them per row of the tile.
//
//   bit i of a word = element i is true; bits are little-endian until they are stored
#pragma once
#include "common/types.cuh"

namespace cukv {

constexpr int WORD_BITS = 32;
constexpr int ROW_BITS = WARP_SIZE * WORD_BITS;  // one word per lane

// What a warp has in flight: two rows are 4 loads of 16 bytes per lane.
constexpr int TILE_ROWS = 2;
constexpr int TILE_BITS = TILE_ROWS * ROW_BITS;
constexpr int TILE_BYTES = TILE_BITS / 8;

// Elements of any dtype and stride. An element is true if it has a bit of truth_mask, which has all
// bits but a float's sign: NaN is true, -0.0 is not.
struct Elements {
    const char* data;
    int64_t stride;  // bytes from one element to the next, may be negative
    int64_t size;
    uint64_t truth_mask;

    // What makes element i true, of BYTES bytes. Without a branch, so that loads go out together.
    template <int BYTES>
    __device__ __forceinline__ uint64_t truth(int64_t i) const {
        const char* element = data + i * stride;
        if constexpr (BYTES == 8) {
            return *reinterpret_cast<const uint64_t*>(element) & truth_mask;
        } else if constexpr (BYTES == 4) {
            return *reinterpret_cast<const uint32_t*>(element) & truth_mask;
        } else if constexpr (BYTES == 2) {
            return *reinterpret_cast<const uint16_t*>(element) & truth_mask;
        } else {
            return *reinterpret_cast<const uint8_t*>(element) & truth_mask;
        }
    }

    // Whether the aligned vectors that hold elements [first, first + TILE_BITS) lie inside `data`.
    __device__ __forceinline__ bool has_vectors(int64_t first) const {
        const int64_t before = reinterpret_cast<uint64_t>(data + first) % 16;
        const int64_t after = before == 0 ? 0 : 16 - before;
        return stride == 1 && first >= before && first <= size - TILE_BITS - after;
    }
};

// Bits of 8 bytes, shifted left by 7. A byte's top bit becomes whether it is nonzero; the dot
// product with powers of two gathers the top bits.
__device__ __forceinline__ uint32_t pack_8(uint32_t low, uint32_t high) {
    constexpr uint32_t TOP = 0x80808080u;
    low = (((low & ~TOP) + ~TOP) | low) & TOP;
    high = (((high & ~TOP) + ~TOP) | high) & TOP;
    return __dp4a(high, 0x80402010u, __dp4a(low, 0x08040201u, 0u));
}

// Bits of 16 bytes; `keep` masks each of them, so that a float's sign alone is not truth.
__device__ __forceinline__ uint32_t pack_16(uint4 x, uint32_t keep) {
    return (pack_8(x.x & keep, x.y & keep) >> 7) | (pack_8(x.z & keep, x.w & keep) << 1);
}

// Words of the tile whose first element is at `first`, at any alignment. The lane packs aligned
// vectors; where those start early, its bits move down and the next lane's fill them up.
__device__ __forceinline__ void pack_vectors(
    const Elements& elements, int64_t first_element, uint32_t (&words)[TILE_ROWS]) {
    const int lane_idx = threadIdx.x % WARP_SIZE;
    const char* first = elements.data + first_element;
    const uint32_t keep = static_cast<uint32_t>(elements.truth_mask) * 0x01010101u;
    const int before = static_cast<int>(reinterpret_cast<uint64_t>(first) % 16);
    const uint4* vectors = reinterpret_cast<const uint4*>(first - before);
    uint4 x[TILE_ROWS][2], last = {};
#pragma unroll
    for (int row = 0; row < TILE_ROWS; ++row) {
        x[row][0] = __ldcs(vectors + row * (ROW_BITS / 16) + lane_idx * 2);
        x[row][1] = __ldcs(vectors + row * (ROW_BITS / 16) + lane_idx * 2 + 1);
    }
    if (before != 0) {
        last = __ldg(vectors + TILE_BITS / 16);
    }
#pragma unroll
    for (int row = 0; row < TILE_ROWS; ++row) {
        words[row] = pack_16(x[row][0], keep) | pack_16(x[row][1], keep) << 16;
    }
    if (before != 0) {
#pragma unroll
        for (int row = 0; row < TILE_ROWS; ++row) {
            // Lane 31 takes from lane 0, which passes on its word of the next row.
            const uint32_t next_row = row + 1 < TILE_ROWS ? words[row + 1] : pack_16(last, keep);
            const uint32_t passed = lane_idx == 0 ? next_row : words[row];
            const uint32_t next = __shfl_sync(0xffffffffu, passed, (lane_idx + 1) % WARP_SIZE);
            words[row] = __funnelshift_r(words[row], next, before);
        }
    }
}

// The lane's word of the row of elements [first, end), of at most ROW_BITS: an element per lane
// and vote. Past the end it loads the last element again.
template <int BYTES>
__device__ __forceinline__ uint32_t vote_word(const Elements& x, int64_t first, int64_t end) {
    constexpr int UNROLL = 8;  // loads in flight per lane
    const int lane_idx = threadIdx.x % WARP_SIZE;
    uint32_t word = 0;
#pragma unroll 1
    for (int base = 0; base < WARP_SIZE && first + base * WORD_BITS < end; base += UNROLL) {
        uint64_t truth[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int64_t element = first + (base + i) * WORD_BITS + lane_idx;
            truth[i] = x.truth<BYTES>(element < end ? element : end - 1);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int64_t element = first + (base + i) * WORD_BITS + lane_idx;
            const uint32_t votes = __ballot_sync(0xffffffffu, element < end && truth[i] != 0);
            word = lane_idx == base + i ? votes : word;
        }
    }
    return word;
}

// Stores a word at byte `offset`, a multiple of 4, of an output that may end inside it.
__device__ __forceinline__ void store_word(
    uint8_t* out, int64_t size, int64_t offset, uint32_t word, bool big) {
    if (big) {
        word = __byte_perm(__brev(word), 0, 0x0123);  // reverses the bits of each byte
    }
    if (offset + 4 <= size) {
        *reinterpret_cast<uint32_t*>(out + offset) = word;
        return;
    }
    for (int i = 0; offset + i < size; ++i) {
        out[offset + i] = static_cast<uint8_t>(word >> (8 * i));
    }
}

}  // namespace cukv
