// plan -- deal the tiles of an attention call to CTAs: the work list, from the present lengths.
//
//   cost of a tile = item_cost + steps of keys that its rows see     (tiles in order of requests;
//                                                 in units of 2^cost_bits steps, rounded up)
//   part g begins where the sum of costs reaches g * share, moved to a whole round of steps
//
// So every part has an equal share, and a tile is cut only where a part begins inside it: item
// (tile, part) is items[tile + part]. With fixed_item_tokens a tile is cut at multiples of it
// instead, whatever else is in the batch, and a part begins with the item that it falls into.
// A thread owns a request. Every CTA sums the costs of all requests before its own by itself, so
// that CTAs need not wait for each other. Bound by latency.
// Any contents of the index arrays are safe: pages outside `indices`, rows outside q name nothing.
// Host: cukv/_plan.py Plan.update       Reference: cukv/reference.py prefill
#include "common/ptx.cuh"
#include "common/scan.cuh"
#include "common/work.cuh"

namespace cukv {

struct PlanParams {
    PageTable table;
    Index qo_indptr;  // [batch_size + 1] rows of q, or not given: one row per request
    WorkList work;
    Divisor group;          // by group_size
    Divisor rows_per_tile;  // packed rows
    int32_t num_q_rows;
    int32_t step_bits;   // log2 of the tokens of a warp's step
    int32_t round_bits;  // log2 of the steps that a CTA's warps take side by side
    int32_t item_cost;   // steps that an item costs beside its keys
    int32_t cost_bits;   // log2 of the steps of a unit of cost
    int32_t reserved;
    int32_t fixed_item_tokens;  // where items are fixed
    int32_t max_fixed_items;    // of a request, where items are fixed
    int32_t causal;
    int32_t window_left;  // -1: off
};

static_assert(sizeof(PlanParams) == PARAMS_BYTES, "host and device disagree on the parameters");

constexpr int64_t MAX_TOKENS = 1 << 30;  // of a request
constexpr int64_t MAX_COST = 1 << 30;    // of all tiles; the host makes units large enough

__device__ __forceinline__ int32_t clamp(int64_t x, int32_t low, int32_t high) {
    return static_cast<int32_t>(min(max(x, int64_t{low}), int64_t{high}));
}

// A request's rows and keys as the work list may name them: inside q and `indices`. ONE_TILE: no
// request has more than one tile. One without rows has one too, without rows.
template <bool ONE_TILE>
struct RequestRows {
    int32_t first_page;
    int32_t first_q_row;
    int32_t kv_len;
    int32_t qo_len;
    int32_t packed_rows;
    int32_t num_tiles;

    __device__ __forceinline__ RequestRows(const PlanParams& p, int32_t request_idx) {
        const int32_t num_indices = static_cast<int32_t>(p.table.indices.size);
        first_page = clamp(p.table.indptr[request_idx], 0, num_indices);
        const int64_t full_pages =
            clamp(p.table.indptr[request_idx + 1], first_page, num_indices) - first_page - 1;
        const int32_t page_size = p.table.page_divisor.divisor;
        const Index& lens = p.table.last_page_len;  // not given: last pages are full
        const int32_t last = lens.given() ? clamp(lens[request_idx], 0, page_size) : page_size;
        kv_len = full_pages < 0 ? 0 : min(full_pages * p.table.page_size + last, MAX_TOKENS);
        first_q_row = request_idx;
        qo_len = 1;
        if (p.qo_indptr.given()) {
            first_q_row = clamp(p.qo_indptr[request_idx], 0, p.num_q_rows);
            qo_len = clamp(p.qo_indptr[request_idx + 1], first_q_row, p.num_q_rows) - first_q_row;
        }
        packed_rows = qo_len * p.group.divisor;
        num_tiles =
            ONE_TILE ? 1
                     : max(1, p.rows_per_tile.quotient(packed_rows + p.rows_per_tile.divisor - 1));
    }
};

// Units of cost of so many steps.
__device__ __forceinline__ int32_t units(const PlanParams& p, int32_t steps) {
    return (steps + (1 << p.cost_bits) - 1) >> p.cost_bits;
}

// So much before its end no part begins in a tile: half a round, and what rounding up may add.
__device__ __forceinline__ int32_t half_cost(const PlanParams& p) {
    return units(p, (1 << p.round_bits >> 1) + (1 << p.cost_bits) - 1);
}

// Rows of a tile, and the keys that some of them see.
struct Tile {
    int32_t first_row;
    int32_t num_rows;
    int32_t first_token;
    int32_t num_tokens;

    template <bool ONE_TILE>
    __device__ __forceinline__
    Tile(const PlanParams& p, const RequestRows<ONE_TILE>& rows, int32_t tile_idx) {
        const int32_t rows_per_tile = p.rows_per_tile.divisor;
        first_row = tile_idx * rows_per_tile;
        num_rows = min(rows_per_tile, rows.packed_rows - first_row);
        const int32_t diagonal = rows.kv_len - rows.qo_len;  // position of the first query
        const int32_t first_q = p.group.quotient(first_row);
        const int32_t last_q = num_rows > 0 ? p.group.quotient(first_row + num_rows - 1) : -1;
        const int32_t first = p.window_left < 0 ? 0 : diagonal + first_q - p.window_left;
        const int32_t end = p.causal ? diagonal + last_q + 1 : rows.kv_len;
        first_token = min(max(first, 0), rows.kv_len);
        num_tokens = num_rows > 0 ? max(end - first_token, 0) : 0;
    }

    // At least half a round, so that no part begins less than that before two tiles.
    __device__ __forceinline__ int32_t cost(const PlanParams& p) const {
        const int32_t steps = (num_tokens + (1 << p.step_bits) - 1) >> p.step_bits;
        return max(units(p, p.item_cost + steps), half_cost(p) + (p.item_cost >> p.cost_bits));
    }
};

// Items of a tile that is cut whatever else is in the batch.
struct FixedItems {
    int32_t tokens;
    int32_t num;

    __device__ __forceinline__
    FixedItems(const PlanParams& p, const Tile& tile, int32_t num_tiles) {
        const int32_t round = 1 << (p.round_bits + p.step_bits);
        const int32_t most = max(p.max_fixed_items / num_tiles, 1);
        const int32_t least = (tile.num_tokens + most - 1) / most;
        tokens = max((least + round - 1) & -round, p.fixed_item_tokens);
        num = max((tile.num_tokens + tokens - 1) / tokens, 1);
    }
};

// What tiles take of the list, summed over some of them. FIXED: items are fixed.
template <bool ONE_TILE, bool FIXED>
struct Taken {
    int64_t cost = 0;
    int64_t tiles = 0;
    int64_t fixed_items = 0;
    int64_t fixed_slots = 0;

    __device__ __forceinline__ void add(const PlanParams& p, const Tile& tile, int32_t num_tiles) {
        cost += tile.cost(p);
        tiles += 1;
        if constexpr (FIXED) {
            const int32_t num = FixedItems(p, tile, num_tiles).num;
            fixed_items += num;
            fixed_slots += num > 1 ? num : 0;
        }
    }

    __device__ __forceinline__ void add(const PlanParams& p, const RequestRows<ONE_TILE>& rows) {
        for (int32_t i = 0; i < rows.num_tiles; ++i) {
            add(p, Tile(p, rows, i), rows.num_tiles);
        }
    }

    // The sum over the threads before this one, and over all.
    __device__ __forceinline__ Taken before(const PlanParams& p, ScanSmem& smem, Taken& all) const {
        Taken sum;
        sum.cost = cta_exclusive_sum(smem, cost, all.cost);
        if constexpr (!ONE_TILE) {
            sum.tiles = cta_exclusive_sum(smem, tiles, all.tiles);
        }
        if constexpr (FIXED) {
            sum.fixed_items = cta_exclusive_sum(smem, fixed_items, all.fixed_items);
            sum.fixed_slots = cta_exclusive_sum(smem, fixed_slots, all.fixed_slots);
        }
        return sum;
    }

    __device__ __forceinline__ void add(const Taken& other) {
        cost += other.cost;
        tiles += other.tiles;
        fixed_items += other.fixed_items;
        fixed_slots += other.fixed_slots;
    }
};

// Writes what the list says of one tile.
template <bool ONE_TILE>
struct TileWriter {
    const PlanParams& p;
    const RequestRows<ONE_TILE>& rows;
    const Tile tile;
    const int32_t share;
    const int32_t begin_cost;
    const int32_t end_cost;
    const int32_t part;  // that the tile begins in

    __device__ __forceinline__ TileWriter(
        const PlanParams& p,
        const RequestRows<ONE_TILE>& rows,
        int32_t tile_idx,
        int64_t cost,
        int32_t share)
        : p(p),
          rows(rows),
          tile(p, rows, tile_idx),
          share(share),
          begin_cost(static_cast<int32_t>(cost)),
          end_cost(begin_cost + tile.cost(p)),
          part(boundary(begin_cost)) {}

    // The last part that begins at a cost or before it.
    __device__ __forceinline__ int32_t boundary(int32_t cost) const {
        return static_cast<uint32_t>(cost) / static_cast<uint32_t>(share);
    }

    // Where in the tile part g begins, in steps, before it is moved to a whole round.
    __device__ __forceinline__ int32_t step(int32_t g) const {
        return ((g * share - begin_cost) << p.cost_bits) - p.item_cost;
    }

    __device__ __forceinline__ Item
    item(int32_t begin, int32_t end, int32_t item_idx, int32_t num, int32_t slot, int32_t next_slot)
        const {
        return {rows.first_page,        rows.first_q_row, rows.kv_len - rows.qo_len,
                tile.first_row,         tile.num_rows,    tile.first_token + begin,
                tile.first_token + end, item_idx,         num,
                num > 1 ? slot : -1,    next_slot};
    }

    __device__ __forceinline__ void put(int64_t idx, const Item& item, int32_t first_of) const {
        if (idx < p.work.max_items) {
            p.work.items[idx] = item;
        }
        if (first_of >= 0 && first_of < p.work.num_parts) {
            p.work.first_items[first_of] = item;
        }
    }

    // Part g begins with items[begin], and the one before ends before items[end].
    __device__ __forceinline__ void put_part(int32_t g, int64_t begin, int64_t end) const {
        if (g < p.work.num_parts) {  // behind the last tile there is none
            p.work.part_begin[g] = min(begin, int64_t{p.work.max_items});
            p.work.part_end[g - 1] = min(end, int64_t{p.work.max_items});
        }
    }

    // Cuts the tile where parts begin. Such a beginning less than half a round before the tile's
    // end moves behind it, which the next tile knows by its cost alone; one no more than that
    // behind its start moves there; any other goes to the nearest round. No two meet, because a
    // share is two half_costs at least.
    __device__ __forceinline__ void cut_at_parts(int64_t tile_idx) const {
        const int32_t half = 1 << p.round_bits >> 1;
        const int32_t end_half = half_cost(p);
        // Parts behind the last begin with the next tile.
        const int32_t last = boundary(end_cost - end_half);
        const int32_t to_first = begin_cost + ((p.item_cost + half) >> p.cost_bits);
        const int32_t first = min(last, boundary(to_first));
        const auto token = [&](int32_t g) {  // half a round goes down
            const int32_t rounds = (step(g) + half - 1) >> p.round_bits;
            return rounds << (p.round_bits + p.step_bits);
        };
        for (int32_t g = part + 1; g <= first; ++g) {
            put_part(g, tile_idx + g, tile_idx + g - 1);
        }
        const bool begins_part = first > part || begin_cost - part * share < end_half;
        for (int32_t g = first; g <= last; ++g) {
            const int32_t begin = g == first ? 0 : token(g);
            const int32_t end = g == last ? tile.num_tokens : token(g + 1);
            const bool is_first = g > first || begins_part;
            // A part leaves one state at its end and one at its start, if at all.
            const int32_t cut = first + 1, slot = p.work.num_parts + cut;
            put(tile_idx + g, item(begin, end, g - first, last - first + 1, slot, cut),
                is_first ? g : -1);
            if (g > first) {
                put_part(g, tile_idx + g, tile_idx + g);
            }
        }
        if (boundary(end_cost) > last) {
            put_part(last + 1, tile_idx + last + 2, tile_idx + last + 1);
        }
    }

    __device__ __forceinline__ void cut_at_fixed_tokens(int64_t first_item, int64_t slot) const {
        const FixedItems items(p, tile, rows.num_tiles);
        // Too few slots are left only for tables that name pages or rows twice.
        const bool fits = items.num == 1 || slot + items.num <= p.work.max_slots;
        const auto item_at = [&](int32_t i) {
            const int32_t begin = i * items.tokens;
            const int32_t end = min(begin + items.tokens, tile.num_tokens);
            Item made = item(begin, end, i, items.num, slot, slot + 1);
            made.num_rows = fits ? made.num_rows : 0;
            return made;
        };
        for (int32_t i = 0; i < items.num; ++i) {
            put(first_item + i, item_at(i), i == 0 && begin_cost == 0 ? 0 : -1);
        }
        for (int32_t g = part + 1; g <= boundary(end_cost); ++g) {
            const int32_t token = max(step(g), 0) << p.step_bits;
            const int32_t i = min(token / items.tokens, items.num - 1);
            put_part(g, first_item + i, first_item + i);
            if (g < p.work.num_parts) {
                p.work.first_items[g] = item_at(i);
            }
        }
    }
};

// Registers for all that a thread knows of its request.
constexpr int MAX_THREADS = 512;

template <bool ONE_TILE, bool FIXED>
__global__ void __launch_bounds__(MAX_THREADS) plan(const __grid_constant__ PlanParams p) {
    __shared__ ScanSmem smem;
    griddepcontrol_wait();
    const int32_t batch_size = static_cast<int32_t>(p.table.batch_size);
    const int32_t num_threads = blockDim.x;
    const int32_t cta_first = blockIdx.x * num_threads;
    const int32_t request_idx = cta_first + threadIdx.x;
    const bool owned = request_idx < batch_size;

    // 1 what this thread's request takes, what all before it take, and all together
    const RequestRows<ONE_TILE> rows(p, owned ? request_idx : 0);
    Taken<ONE_TILE, FIXED> own, all;
    if (owned) {
        own.add(p, rows);
    }
    Taken<ONE_TILE, FIXED> at = own.before(p, smem, all);
    if (gridDim.x > 1) {
        Taken<ONE_TILE, FIXED> earlier, others, sum;  // of the CTAs before this one, of all
#pragma unroll(ONE_TILE && !FIXED ? 4 : 1)
        for (int32_t i = threadIdx.x; i < batch_size; i += num_threads) {
            Taken<ONE_TILE, FIXED> other;
            other.add(p, RequestRows<ONE_TILE>(p, i));
            others.add(other);
            if (i < cta_first) {
                earlier.add(other);
            }
        }
        earlier.before(p, smem, sum);
        at.add(sum);
        others.before(p, smem, all);
    }
    const uint32_t parts = p.work.num_parts;
    const uint32_t even = (static_cast<uint32_t>(min(all.cost, MAX_COST)) + parts - 1) / parts;
    const int32_t share = max(static_cast<int32_t>(even), 2 * half_cost(p));
    const bool dealt = all.cost <= MAX_COST;

    // 2 its items, and the parts that begin with them
    if (owned && dealt) {
        for (int32_t i = 0; i < rows.num_tiles; ++i) {
            const TileWriter<ONE_TILE> writer(p, rows, i, at.cost, share);
            if constexpr (FIXED) {
                writer.cut_at_fixed_tokens(at.fixed_items, at.fixed_slots);
            } else {
                writer.cut_at_parts(ONE_TILE ? request_idx : at.tiles);
            }
            at.add(p, writer.tile, rows.num_tiles);
        }
    }

    griddepcontrol_launch_dependents();
    // 3 the first part, the last, and those that are left without items; no ticket is taken
    const int32_t all_cost = static_cast<int32_t>(min(all.cost, MAX_COST));
    const int32_t last = dealt ? min(all_cost / share, p.work.num_parts - 1) : -1;
    const int64_t num_tiles = ONE_TILE ? batch_size : all.tiles;
    const int64_t end = FIXED ? all.fixed_items : num_tiles + last;
    const int32_t num_all = gridDim.x * num_threads;
    for (int32_t g = request_idx; g < p.work.num_parts; g += num_all) {
        if (g == 0 || g > last) {
            p.work.part_begin[g] = 0;
        }
        if (g >= last) {
            p.work.part_end[g] = g == last ? min(end, int64_t{p.work.max_items}) : 0;
        }
    }
    for (int32_t i = request_idx; i < p.work.max_slots * p.work.num_kv_heads; i += num_all) {
        p.work.tickets[i] = 0;
    }
}

}  // namespace cukv
