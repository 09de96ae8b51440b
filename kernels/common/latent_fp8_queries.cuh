// Queries of latent rows of e4m3 on Hopper, brought by the warps that compute with them.
//
// Scales and queries' factors differ between the two parts of a row, whose scores so stay apart.
#pragma once
#include "common/latent_fp8.cuh"
#include "common/latent_queries.cuh"

namespace cukv {

// Queries in blocks of 64 columns, as operands of KV's products.
template <typename KV>
struct BlockOperands {
    // Eight columns of a row.
    static __device__ __forceinline__ void store(
        char* blocks, int row, int chunk, const Vec<Operand<KV>, 8>& x) {
        store_vec(blocks + chunk / 8 * BLOCK_BYTES + swizzled<128>(row, chunk % 8), x);
    }
};

// Loads the queries of an item, by WARPS warps that wait for nothing else: they have the registers
// to ask for many rows at a time. Others see them behind a barrier.
template <typename KPE, int WARPS>
__device__ __forceinline__ void load_latent_fp8_queries(
    const LatentParams& p, LatentFp8Smem& smem, const Item& item, int block) {
    using Tile = LatentQueryTile<fp8_e4m3, KPE>;
    constexpr int OWN = LATENT_ROWS / WARPS, NUM = 4;  // rows of a warp, and of them at a time
    static_assert(OWN % NUM == 0, "a warp's rows come in whole turns");
    const int lane_idx = threadIdx.x % WARP_SIZE;
    const int kind = p.q_nope_rows.kind, num_bytes = 8 * element_bytes(kind);  // q_pe is alike
    const bool has_pe = lane_idx < HEAD_DIM_KPE / 8;
    const int first = threadIdx.x / WARP_SIZE * OWN;
#pragma unroll 1
    for (int base = first; base < first + OWN; base += NUM) {
        Query8 nope[NUM][2], pe[NUM][1];
#pragma unroll
        for (int i = 0; i < NUM; ++i) {
            const LatentRow from(p, item, block, base + i);
            const char* q_nope = p.q_nope + (from.owned ? p.q_nope_rows.offset(from.at) : 0);
            const char* q_pe = p.q_pe + (from.owned ? p.q_pe_rows.offset(from.at) : 0);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                nope[i][j].load(
                    q_nope + (lane_idx + j * WARP_SIZE) * num_bytes, kind, p.q_nope_rows.aligned);
            }
            pe[i][0].bits = uint4{};
            if (has_pe) {
                pe[i][0].load(q_pe + lane_idx * num_bytes, kind, p.q_pe_rows.aligned);
            }
        }
#pragma unroll
        for (int i = 0; i < NUM; ++i) {
            const float nope_factor = Tile::template store<fp8_e4m3, BlockOperands<fp8_e4m3>>(
                smem.q[0], base + i, nope[i], kind, true);
            const float pe_factor = Tile::template store<KPE, BlockOperands<KPE>>(
                smem.q[KPE_BLOCK], base + i, pe[i], kind, has_pe);
            if (lane_idx == 0) {
                const float scale = p.sm_scale * LOG2_E;
                smem.scales[base + i] = {
                    nope_factor * scale * p.ckv_scale.get(), pe_factor * scale * p.kpe_scale.get()};
            }
        }
    }
}

}  // namespace cukv
