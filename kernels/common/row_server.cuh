// Warps that bring a team its queries and take its results, item by item ahead of the team.
//
// Queries of an item lie in one of Cta::SLOTS places, and so do its results when the team has computed
// them. Cta: Queries and Results, their tiles; TEAM_ROWS; Order, which tells the team what to do; Smem
// with q, orders and their barriers. Params: work, q, q_rows, o, o_rows, group, scales, head_dim_vo.
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

    // Calls visit(chunk's address in the tile, row, chunk) for this lane's 16-byte chunks of a tile.
    template <typename Tile, typename Visit>
    __device__ __forceinline__ void each_chunk(char* tile, Visit visit) const {
        constexpr int CHUNKS = Tile::BYTES / Cta::TEAM_ROWS / 16, ROWS_AT_ONCE = WARP_SIZE / CHUNKS;
        const int chunk = threadIdx.x % CHUNKS;
#pragma unroll 4
        for (int i = 0; i < Cta::TEAM_ROWS; i += ROWS_AT_ONCE) {
            const int row = i + threadIdx.x % WARP_SIZE / CHUNKS;
            visit(tile + Tile::offset(row, chunk), row, chunk);
        }
    }

    // Scores must rise with the logits: a negative scale becomes one of the queries' signs.
    __device__ __forceinline__ void load_queries(int slot, const Order& order, bool negate) const {
        const Item& item = order.item;
        const int num_rows = Cta::own_rows(item, team);
        char* tile = smem.q[slot][team];
        const bool aligned = p.q_rows.aligned;
        each_chunk<typename Cta::Queries>(tile, [&](char* to, int row, int chunk) {
            const PackedRow at(p.group, item, order.kv_head, team * Cta::TEAM_ROWS + row);
            const bool owned = row < num_rows;
            const char* from = p.q + (owned ? p.q_rows.offset(at) : 0) + chunk * 16;
            if (aligned) {
                cp_async_16(smem_address(to), from, owned ? 16 : 0);
            } else {
                Query8 x = {};
                if (owned) {
                    x.load(from, p.q_rows.kind, false);
                }
                *reinterpret_cast<uint4*>(to) = x.bits;
            }
        });
        cp_async_commit_group();
        cp_async_wait_group<0>();
        if (negate) {
            each_chunk<typename Cta::Queries>(tile, [&](char* to, int, int) {
                constexpr uint32_t SIGNS = 0x80008000u;
                uint4& x = *reinterpret_cast<uint4*>(to);
                x = make_uint4(x.x ^ SIGNS, x.y ^ SIGNS, x.z ^ SIGNS, x.w ^ SIGNS);
            });
        }
    }

    __device__ __forceinline__ void store_results(int slot, uint32_t parity) const {
        mbarrier_try_wait(smem.o_full[slot][team], parity);
        const Order& order = smem.orders[slot][team];
        if (!order.results) {
            return;
        }
        const int num_rows = Cta::own_rows(order.item, team);
        each_chunk<typename Cta::Results>(smem.q[slot][team], [&](char* from, int row, int chunk) {
            if (row < num_rows && chunk * 8 < p.head_dim_vo) {
                const PackedRow at(p.group, order.item, order.kv_head, team * Cta::TEAM_ROWS + row);
                char* to = p.o + p.o_rows.offset(at) + chunk * 16;
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
            }
        });
    }

    __device__ __forceinline__ void serve() const {
        // No division: its subroutine is the teams' too, and takes registers that this warp gave away.
        const bool negate = p.sm_scale * p.q_scale.get() * p.k_scale.get() < 0.0f;
        const int lane_idx = threadIdx.x % WARP_SIZE;
        ItemWalk walk(p.work);
        Order order = {};
        for (uint32_t n = 0;; ++n) {
            const int slot = n % Cta::SLOTS;
            order.item = walk.next(order.kv_head);
            if (n >= Cta::SLOTS) {
                store_results(slot, (n / Cta::SLOTS - 1) & 1);
                __syncwarp();  // the slot has been read
            }
            if (lane_idx == 0) {
                smem.orders[slot][team] = order;
            }
            if (order.item.num_rows > 0) {
                load_queries(slot, order, negate);
                fence_proxy_async();
            }
            __syncwarp();
            if (lane_idx == 0) {
                mbarrier_arrive(smem.q_full[slot][team]);
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
