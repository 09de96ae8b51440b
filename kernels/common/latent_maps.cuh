// What kernels over latent rows are given where tensor maps can read the cache, on Hopper.
#pragma once
#include "common/latent.cuh"
#include "common/ptx_sm90.cuh"

namespace cukv {

// Of the maps' axes and boxes: cukv/_latent_maps.py.
struct LatentMappedParams : LatentParams {
    TensorMap ckv_map;
    TensorMap kpe_map;
    int32_t piece_bits;  // log2 of the tokens that one copy brings, which lie in one page
};

}  // namespace cukv
