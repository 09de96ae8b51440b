// Dropped keys: those of a step whose page does not exist. Who brings keys finds them, teams hide
// them.
//
//   by maps    one word: bit i tells of piece i, of 2^piece_bits tokens
//   by tokens  a word for every fourth lane, of the keys 8 * tile + lane % 4 * 2 + i that its
//              scores are of: bit tile % 4 * 8 + tile / 4 * 2 + i
#pragma once
#include "common/ptx.cuh"

namespace cukv {

template <bool MAPPED>
struct DroppedKeys {
    static constexpr int WORDS = MAPPED ? 1 : 4;  // of a step

    uint32_t bits = 0;  // this lane's word

    // Whether any are dropped. By a warp; all warps that ask about a step hear the same.
    __device__ __forceinline__ bool any() const {
        return MAPPED ? bits != 0 : __any_sync(0xffffffffu, bits != 0);
    }

    // Whether the key of this lane's scores [tile][i] and [tile][i + 2], of its two rows, is
    // dropped.
    __device__ __forceinline__ bool has(int tile, int i, int piece_bits) const {
        const int bit = MAPPED ? tile * 8 >> piece_bits : tile % 4 * 8 + tile / 4 * 2 + i;
        return bits >> bit & 1;
    }

    // Adds keys [32 * k, 32 * k + 32), k < 4, by tokens: bit j of `missing` tells of key
    // 32 * k + j.
    __device__ __forceinline__ void add(int k, uint32_t missing) {
        bits |= (missing >> tid_x() % 4 * 2 & 0x03030303u) << 2 * k;
    }
};

}  // namespace cukv
