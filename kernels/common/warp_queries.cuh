// The query rows of a tile that one warp needs, brought by that warp alone: it needs no other to
// have finished the tile before.
#pragma once
#include "common/queries.cuh"

namespace cukv {

// Rows [first_row, first_row + ROWS) of a tile. Params: q, q_rows, levels, group, head_dim.
template <typename KV, int HEAD_DIM, int TILE_ROWS, int ROWS>
struct WarpQueries {
    using Tile = QueryTile<KV, HEAD_DIM, TILE_ROWS>;
    static constexpr int CHUNKS = HEAD_DIM / 8, ROWS_AT_ONCE = WARP_SIZE / CHUNKS;
    static_assert(WARP_SIZE % CHUNKS == 0, "lanes share rows evenly");
    static constexpr int KIND = is_same<Operand<KV>, half> ? KIND_HALF : KIND_BFLOAT16;

    // Starts bringing the rows of an item, which are the warp's own; zeros past them and head_dim.
    // They are there when the copies of this thread have landed, for others after a barrier.
    template <typename Params>
    static __device__ __forceinline__ void load(
        const Params& p, Tile& tile, int first_row, const Item& own, int kv_head) {
        __syncwarp();  // every lane has read the rows before
        const int lane_idx = tid_x() % WARP_SIZE, chunk = lane_idx % CHUNKS;
        const int kind = p.q_rows.kind;
        const PackedRow at(p.group, own, kv_head, max(min(lane_idx, own.num_rows - 1), 0));
        const int64_t offset = own.num_rows > 0 ? p.q_rows.offset(at.in(p.levels.q_rows)) : 0;
        const bool has_chunk = chunk * 8 < p.head_dim;
        const auto each_row = [&](auto visit) {
#pragma unroll 4
            for (int i = 0; i < ROWS; i += ROWS_AT_ONCE) {
                const int row = i + lane_idx / CHUNKS;
                const char* from =
                    p.q + __shfl_sync(0xffffffffu, offset, row) + chunk * 8 * element_bytes(kind);
                visit(from, row, has_chunk && row < own.num_rows);
            }
        };
        if (!is_fp8<KV> && kind == KIND && p.q_rows.aligned) {
            each_row([&](const char* from, int row, bool given) {
                const auto* to = &tile.x[first_row + row][chunk * 8];
                cp_async_16(smem_address(to), from, given ? 16 : 0);
            });
            cp_async_commit_group();
            return;
        }
        each_row([&](const char* from, int row, bool given) {
            Query8 x;
            x.bits = uint4{};
            if (given) {
                x.load(from, kind, p.q_rows.aligned);
            }
            Vec<Operand<KV>, 8> y;
            y.raw = x.bits;
            if (is_fp8<KV> || kind != KIND) {
                float floats[8];
                x.to_floats(floats, kind);
                if constexpr (is_fp8<KV>) {
                    using Loader = QueryLoader<KV, HEAD_DIM, TILE_ROWS, CHUNKS>;
                    Loader::divide_by_largest(floats, tile.factor[first_row + row]);
                }
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    y[e] = from_float<Operand<KV>>(floats[e]);
                }
            }
            store_vec(reinterpret_cast<char*>(&tile.x[first_row + row][chunk * 8]), y);
        });
    }
};

}  // namespace cukv
