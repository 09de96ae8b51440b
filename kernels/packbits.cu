// packbits -- truth values of any dtype to bits, eight elements to a byte.
//
//   bit i % 8 of out[i / 8] = x[i] is true       (bit 7 - i % 8 in big order; the tail is 0)
//
// One warp per tile of TILE_BITS elements: by 16-byte vectors where x holds bytes side by side and
// the tile is full, else by votes.
// Bound by HBM: BYTES + 1 / 8 bytes per element.
// Host: cukv/bits.py packbits       Reference: cukv/reference.py packbits
#include "common/bits.cuh"

namespace cukv {

struct PackbitsParams {
    uint8_t* out;  // [ceil(x.size / 8)]
    Elements x;
    int32_t big;  // 1: the first element is a byte's highest bit
};

static_assert(sizeof(PackbitsParams) == PARAMS_BYTES, "host and device disagree on the parameters");

template <int BYTES>
__global__ void __launch_bounds__(256) packbits(const __grid_constant__ PackbitsParams p) {
    // 1 which tile
    const int lane_idx = threadIdx.x % WARP_SIZE;
    const int64_t tile = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / WARP_SIZE;
    const int64_t first = tile * TILE_BITS;
    if (first >= p.x.size) {
        return;
    }
    // 2 its words
    uint32_t words[TILE_ROWS];
    if (BYTES == 1 && p.x.has_vectors(first)) {
        pack_vectors(p.x, first, words);
    } else {
#pragma unroll
        for (int row = 0; row < TILE_ROWS; ++row) {
            words[row] = vote_word<BYTES>(p.x, first + row * ROW_BITS, p.x.size);
        }
    }
    // 3 store
    const int64_t size = (p.x.size + 7) / 8;
#pragma unroll
    for (int row = 0; row < TILE_ROWS; ++row) {
        const int64_t offset = (first + row * ROW_BITS) / 8 + lane_idx * 4;
        store_word(p.out, size, offset, words[row], p.big);
    }
}

}  // namespace cukv
