// segment_packbits -- truth values to bits, each segment on bytes of its own.
//
//   byte b of segment s: bits of x[i], ..., x[i + 7],  i = indptr[s] + 8 * (b - byte_indptr[s])
//   b >= byte_indptr[-1]: 0        elements at or past indptr[s + 1] or outside x: 0
//
// One warp per TILE_BYTES bytes of `out`, whatever the segments: a tile inside one segment is
// packed as packbits does it, else each lane finds the segment of each of its bytes.
// Bound by HBM: BYTES + 1 / 8 bytes per element.
// Host: cukv/bits.py segment_packbits, cukv/masks.py RaggedMask.pack
// Reference: cukv/reference.py segment_packbits
#include "common/bits.cuh"
#include "common/index.cuh"

namespace cukv {

struct SegmentPackbitsParams {
    uint8_t* out;  // [size]
    int64_t size;  // bytes
    Elements x;
    Index indptr;       // [segments + 1], elements
    Index byte_indptr;  // [segments + 1], bytes, never falls
    int32_t big;        // 1: the first element is a byte's highest bit
};

static_assert(
    sizeof(SegmentPackbitsParams) == PARAMS_BYTES, "host and device disagree on the parameters");

// Segment of a byte, searched in [low, high]; the number of segments for a byte past them all.
__device__ __forceinline__ int64_t
segment_of(const Index& byte_indptr, int64_t byte, int64_t low, int64_t high) {
    while (low < high) {
        const int64_t middle = high - (high - low) / 2;
        if (byte_indptr[middle] > byte) {
            high = middle - 1;
        } else {
            low = middle;
        }
    }
    return low;
}

// Element that a byte of a segment starts with.
__device__ __forceinline__ int64_t
first_element(const SegmentPackbitsParams& p, int64_t segment, int64_t byte) {
    return p.indptr[segment] + 8 * (byte - p.byte_indptr[segment]);
}

// Where a segment's elements end, inside x.
__device__ __forceinline__ int64_t end_element(const SegmentPackbitsParams& p, int64_t segment) {
    const int64_t end = p.indptr[segment + 1];
    return end < 0 ? 0 : end < p.x.size ? end : p.x.size;
}

// The element of x that is nearest to i.
__device__ __forceinline__ int64_t inside(const SegmentPackbitsParams& p, int64_t i) {
    return i < 0 ? 0 : i < p.x.size ? i : p.x.size - 1;
}

// The lane's word at byte `offset` of `out`, whose bytes belong to segments [low, high].
template <int BYTES>
__device__ __forceinline__ uint32_t
mixed_word(const SegmentPackbitsParams& p, int64_t offset, int64_t low, int64_t high) {
    uint32_t word = 0;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
        low = segment_of(p.byte_indptr, offset + i, low, high);
        if (low >= p.indptr.size - 1) {
            break;
        }
        const int64_t first = first_element(p, low, offset + i), end = end_element(p, low);
        uint64_t truth[8];
#pragma unroll
        for (int bit = 0; bit < 8; ++bit) {
            truth[bit] = p.x.truth<BYTES>(inside(p, first + bit));
        }
        uint32_t byte = 0;
#pragma unroll
        for (int bit = 0; bit < 8; ++bit) {
            const int64_t element = first + bit;
            const bool set = element >= 0 && element < end && truth[bit] != 0;
            byte |= static_cast<uint32_t>(set) << bit;
        }
        word |= byte << (8 * i);
    }
    return word;
}

template <int BYTES>
__global__ void __launch_bounds__(256)
    segment_packbits(const __grid_constant__ SegmentPackbitsParams p) {
    // 1 which tile
    const int lane_idx = threadIdx.x % WARP_SIZE;
    const int64_t tile = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / WARP_SIZE;
    const int64_t first_byte = tile * TILE_BYTES;
    if (first_byte >= p.size) {
        return;
    }
    // 2 the segment it starts in; byte_indptr[0] is 0, so there is one or it is past them all
    const int64_t num_segments = p.indptr.size - 1;
    const int64_t low = warp_upper_bound(p.byte_indptr, num_segments + 1, first_byte) - 1;
    int64_t first = -1;
    if (low < num_segments) {
        first = first_element(p, low, first_byte);
    }
    // 3 its words
    uint32_t words[TILE_ROWS] = {};
    if (first >= 0 && first <= end_element(p, low) - TILE_BITS) {
        if (BYTES == 1 && p.x.has_vectors(first)) {
            pack_vectors(p.x, first, words);
        } else {
#pragma unroll
            for (int row = 0; row < TILE_ROWS; ++row) {
                words[row] = vote_word<BYTES>(p.x, first + row * ROW_BITS, p.x.size);
            }
        }
    } else if (low < num_segments && p.x.size > 0) {
        const int64_t last_byte = first_byte + TILE_BYTES - 1;
        const int64_t high = warp_upper_bound(p.byte_indptr, num_segments + 1, last_byte) - 1;
#pragma unroll
        for (int row = 0; row < TILE_ROWS; ++row) {
            const int64_t offset = first_byte + row * (ROW_BITS / 8) + lane_idx * 4;
            words[row] = mixed_word<BYTES>(p, offset, low, high);
        }
    }
    // 4 store
#pragma unroll
    for (int row = 0; row < TILE_ROWS; ++row) {
        const int64_t offset = first_byte + row * (ROW_BITS / 8) + lane_idx * 4;
        store_word(p.out, p.size, offset, words[row], p.big);
    }
}

}  // namespace cukv
