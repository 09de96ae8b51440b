// Warps that bring a team its queries and take its results, item by item ahead of the team.
//
// Queries of an item lie in one of Cta::SLOTS places, and so do its results when the team has
// computed them. Cta: Queries and Results, their tiles; TEAM_ROWS; Order, which tells the team what
// to do; FP8; Smem with q, orders and their barriers. Params: q, q_rows, q_map and q_mapped,
// whether it may be used; the same of o; levels, group, sm_scale, q_scale, k_scale, head_dim_vo.
#pragma once
#include "common/kv_server.cuh"
#include "common/queries.cuh"

namespace cukv {

// Of one team.
template <typename Cta, typename Params>
struct RowServer {
    using Order = typename Cta::Order;

    const Params& p;
    typename Cta::Smem& smem;
    int team;

    // Calls visit(address in the tile, bytes from the array's start, row, first column) for this
    // lane's 16-byte chunks of a tile. Lanes find 32 rows at a time; what is behind the item's is
    // its last.
    template <typename Tile, int UNROLL, typename Visit>
    __device__ __forceinline__ void each_chunk(
        char* tile,
        const QueryRows& rows,
        const int32_t* row_map,  // see PackedRow::in
        const Order& order,
        Visit visit) const {
        constexpr int CHUNKS = Tile::COLUMNS / 8;  // of a row
        const int lane_idx = threadIdx.x % WARP_SIZE;
#pragma unroll 1
        for (int first = 0; first < Cta::TEAM_ROWS; first += WARP_SIZE) {
            const int own = min(team * Cta::TEAM_ROWS + first + lane_idx, order.item.num_rows - 1);
            const PackedRow at(p.group, order.item, order.kv_head, own);
            const int64_t offset = rows.offset(at.in(row_map));
#pragma unroll UNROLL
            for (int i = lane_idx; i < WARP_SIZE * CHUNKS; i += WARP_SIZE) {
                const int row = i / CHUNKS, chunk = i % CHUNKS;
                const int64_t row_offset = __shfl_sync(0xffffffffu, offset, row);
                visit(
                    tile + Tile::offset(first + row, chunk), row_offset + chunk * 16, first + row,
                    chunk * 8);
            }
        }
    }

    // Row of q and o that the team's rows begin with, where a tile begins with a whole one; the
    // item's last for a team without rows.
    __device__ __forceinline__ int32_t first_q_row(const Item& item) const {
        const int row = min(team * Cta::TEAM_ROWS, item.num_rows - 1);
        return item.first_q_row + p.group.quotient(item.first_row + row);
    }

    // By a tensor map: rows behind the item's are others' or zeros.
    __device__ __forceinline__ void copy_queries(int slot, const Order& order) const {
        if (threadIdx.x % WARP_SIZE == 0) {
            uint64_t& full = smem.q_full[slot][team];
            const int32_t row = first_q_row(order.item);
            mbarrier_arrive_expect_tx(full, Cta::Queries::BYTES);
            cp_async_bulk_tensor_4d(
                smem_address(smem.q[slot][team]), p.q_map, full, 0,
                order.kv_head * static_cast<int32_t>(p.group.divisor),
                p.levels.q_rows == nullptr ? row : p.levels.q_rows[row], 0);
        }
    }

    // Scores must rise with the logits: a negative scale becomes one of the queries' signs.
    __device__ __forceinline__ void load_queries(int slot, const Order& order, bool negate) const {
        using Queries = typename Cta::Queries;
        char* tile = smem.q[slot][team];
        if (p.q_rows.aligned) {
            each_chunk<Queries, 8>(
                tile, p.q_rows, p.levels.q_rows, order, [&](char* to, int64_t offset, int, int) {
                    cp_async_16(smem_address(to), p.q + offset, 16);
                });
            cp_async_commit_group();
            cp_async_wait_group<0>();
        } else {
            each_chunk<Queries, 1>(
                tile, p.q_rows, p.levels.q_rows, order, [&](char* to, int64_t offset, int, int) {
                    Query8 x;
                    // 16 elements of fp8 are moved as 8 halves: bits are not looked at.
                    x.load(p.q + offset, Cta::FP8 ? KIND_HALF : p.q_rows.kind, false);
                    *reinterpret_cast<uint4*>(to) = x.bits;
                });
        }
        if (negate) {
            __syncwarp();  // the other lanes' copies have landed too
            for (int i = threadIdx.x % WARP_SIZE; i < Queries::BYTES / 16; i += WARP_SIZE) {
                constexpr uint32_t SIGNS = Cta::FP8 ? 0x80808080u : 0x80008000u;
                uint4& x = reinterpret_cast<uint4*>(tile)[i];
                x = make_uint4(x.x ^ SIGNS, x.y ^ SIGNS, x.z ^ SIGNS, x.w ^ SIGNS);
            }
        }
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % WARP_SIZE == 0) {
            mbarrier_arrive(smem.q_full[slot][team]);
        }
    }

    __device__ __forceinline__ void store_results(int slot, uint32_t parity) const {
        mbarrier_try_wait(smem.o_full[slot][team], parity);
        const Order order = smem.orders[slot][team];
        if (!order.results) {
            return;
        }
        if (p.o_mapped && Cta::own_rows(order.item, team) == Cta::TEAM_ROWS) {
            if (threadIdx.x % WARP_SIZE == 0) {
                cp_async_bulk_tensor_4d_store(
                    p.o_map, 0, order.kv_head * static_cast<int32_t>(p.group.divisor),
                    first_q_row(order.item), 0, smem_address(smem.q[slot][team]));
                cp_async_bulk_commit_group();
                cp_async_bulk_wait_group_read<0>();
            }
            return;
        }
        const int num_rows = Cta::own_rows(order.item, team);
        each_chunk<typename Cta::Results, 8>(
            smem.q[slot][team], p.o_rows, nullptr, order,
            [&](char* from, int64_t offset, int row, int column) {
                const uint4 x = *reinterpret_cast<const uint4*>(from);
                if (row < num_rows && column < p.head_dim_vo) {
                    *reinterpret_cast<uint4*>(p.o + offset) = x;
                }
            });
    }

    __device__ __forceinline__ void serve() const {
        // No division: its subroutine is the teams' too, and takes registers that this warp gave
        // away.
        const bool negate = p.sm_scale * p.q_scale.get() * p.k_scale.get() < 0.0f;
        const int lane_idx = threadIdx.x % WARP_SIZE;
        ItemReader<Cta> items(smem);
        Order order = {};
        for (uint32_t n = 0;; ++n) {
            const int slot = n % Cta::SLOTS;
            order.item = items.next(order.kv_head);
            if (n >= Cta::SLOTS) {
                store_results(slot, (n / Cta::SLOTS - 1) & 1);
                __syncwarp();  // the slot has been read
            }
            if (lane_idx == 0) {
                smem.orders[slot][team] = order;
            }
            if (order.item.num_rows == 0) {
                if (lane_idx == 0) {
                    mbarrier_arrive(smem.q_full[slot][team]);
                }
            } else if (p.q_mapped && p.levels.q_adjacent && !negate) {
                copy_queries(slot, order);
            } else {
                load_queries(slot, order, negate);
            }
            if (order.item.num_rows == 0) {
                for (uint32_t i = n < Cta::SLOTS ? 0 : n - Cta::SLOTS + 1; i < n; ++i) {
                    store_results(i % Cta::SLOTS, i / Cta::SLOTS & 1);
                }
                return;
            }
        }
    }
};

}  // namespace cukv
