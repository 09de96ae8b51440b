// plan -- deal the tiles of an attention call to CTAs: the work list, from the present lengths.
//
//   cost of a tile = item_cost + steps of keys that its rows see     (tiles in order of requests;
//                                                 in units of 2^cost_bits steps, rounded up)
//   part g begins where the sum of costs reaches g * share, moved to a whole round of steps
//
// So every part has an equal share, and a tile is cut only where a part begins inside it: item
// (tile, part) is items[tile + part]. Where parts of as many whole tiles take no longer than parts
// of an even share with its cuts, the share is that many tiles. With fixed_item_tokens a tile is
// cut at multiples of it instead, whatever else is in the batch, and a part begins with the item
// that it falls into. A team of threads owns a request, a thread of it a run of the request's
// tiles. Every CTA sums the costs of all requests before its own by itself, so that CTAs need not
// wait for each other. Bound by latency. There may be two lists, of kernels that serve requests of
// few rows and of many; half of the CTAs make each. Under a custom mask a tile's keys are those
// that kernels/mask_tiles.cu has listed. Any contents of the index arrays are safe: pages outside
// `indices`, rows outside q name nothing.
// Host: cukv/_plan.py Plan.update       Reference: cukv/reference.py prefill
#include "common/ptx.cuh"
#include "common/scan.cuh"
#include "common/tiles.cuh"
#include "common/window.cuh"

namespace cukv {

struct PlanParams {
    PageTable table;
    Index qo_indptr;  // [batch_size + 1] rows of q, or not given: one row per request
    TileList first;
    TileList second;
    const int32_t* first_seen;  // [num_q_rows], see common/window.cuh, or null
    Divisor group;              // by group_size
    int32_t num_q_rows;
    int32_t num_ctas;   // of a list
    int32_t team_bits;  // log2 of the threads of a request
    int32_t causal;
    int32_t window_left;  // -1: off
};

static_assert(sizeof(PlanParams) == PARAMS_BYTES, "host and device disagree on the parameters");

constexpr int64_t MAX_COST = 1 << 30;  // of all tiles; the host makes units large enough

// Units of cost of so many steps.
__device__ __forceinline__ int32_t units(const TileList& list, int32_t steps) {
    return (steps + (1 << list.cost_bits) - 1) >> list.cost_bits;
}

// So much before its end no part begins in a tile: half a round, and what rounding up may add.
__device__ __forceinline__ int32_t half_cost(const TileList& list) {
    return units(list, (1 << list.round_bits >> 1) + (1 << list.cost_bits) - 1);
}

// A thread's run of the tiles of its request.
template <bool ONE_TILE>
struct Run {
    RequestRows<ONE_TILE> rows;
    int32_t first_tile, end_tile;
    int32_t first_mask_tile;

    // Of thread `thread_idx` of all; teams are neighbours.
    __device__ __forceinline__ Run(const PlanParams& p, const TileList& list, int32_t thread_idx)
        : rows(p, list, thread_idx >> p.team_bits) {
        const int32_t mate = thread_idx & ((1 << p.team_bits) - 1);
        const int32_t share = (rows.num_tiles + (1 << p.team_bits) - 1) >> p.team_bits;
        first_tile = min(mate * share, rows.num_tiles);
        end_tile = min(first_tile + share, rows.num_tiles);
        first_mask_tile =
            list.work.mask.first_tile(thread_idx >> p.team_bits, rows.first_q_row, p.group.divisor);
    }
};

// Rows of a tile, and the keys that some of them see.
struct Tile {
    int32_t first_row;
    int32_t num_rows;
    int32_t first_token;
    int32_t num_tokens;
    int32_t mask_entry;

    template <bool ONE_TILE>
    __device__ __forceinline__
    Tile(const PlanParams& p, const TileList& list, const Run<ONE_TILE>& run, int32_t tile_idx) {
        const RequestRows<ONE_TILE>& rows = run.rows;
        first_row = tile_idx << list.row_bits;
        num_rows = min(list.rows_per_tile(), rows.packed_rows - first_row);
        mask_entry = 0;
        if (!ONE_TILE && list.work.mask.given()) {
            const MaskTile tile = list.work.mask.tiles[run.first_mask_tile + tile_idx];
            mask_entry = tile.first_entry;
            first_token = 0;
            num_tokens = tile.num_tokens;
            return;
        }
        const int32_t diagonal = rows.kv_len - rows.qo_len;  // position of the first query
        const int32_t first_q = p.group.quotient(first_row);
        const int32_t last_q = num_rows > 0 ? p.group.quotient(first_row + num_rows - 1) : -1;
        const int32_t first = SeenFrom(p, rows.first_q_row, diagonal, first_q, last_q).least;
        const int32_t end = p.causal ? diagonal + last_q + 1 : rows.kv_len;
        first_token = min(max(first, 0), rows.kv_len);
        num_tokens = num_rows > 0 ? max(end - first_token, 0) : 0;
    }

    // At least half a round, so that no part begins less than that before two tiles.
    __device__ __forceinline__ int32_t cost(const TileList& list) const {
        const int32_t steps = (num_tokens + (1 << list.step_bits) - 1) >> list.step_bits;
        return max(
            units(list, list.item_cost + steps),
            half_cost(list) + (list.item_cost >> list.cost_bits));
    }
};

// Items of a tile that is cut whatever else is in the batch.
struct FixedItems {
    int32_t tokens;
    int32_t num;

    __device__ __forceinline__
    FixedItems(const TileList& list, const Tile& tile, int32_t num_tiles) {
        const int32_t round = 1 << (list.round_bits + list.step_bits);
        const int32_t most = max(list.max_fixed_items / num_tiles, 1);
        const int32_t least = (tile.num_tokens + most - 1) / most;
        tokens = max((least + round - 1) & -round, list.fixed_item_tokens);
        num = max((tile.num_tokens + tokens - 1) / tokens, 1);
    }
};

// What tiles take of the list, summed over some of them. FIXED: items are fixed.
template <bool ONE_TILE, bool FIXED>
struct Taken {
    int64_t cost = 0;
    int32_t largest = 0;  // of a tile; of this thread's only
    int64_t tiles = 0;
    int64_t fixed_items = 0;
    int64_t fixed_slots = 0;

    __device__ __forceinline__ void add(const TileList& list, const Tile& tile, int32_t num_tiles) {
        const int32_t own_cost = tile.cost(list);
        cost += own_cost;
        largest = max(largest, own_cost);
        tiles += 1;
        if constexpr (FIXED) {
            const int32_t num = FixedItems(list, tile, num_tiles).num;
            fixed_items += num;
            fixed_slots += num > 1 ? num : 0;
        }
    }

    __device__ __forceinline__ void add(
        const PlanParams& p, const TileList& list, const Run<ONE_TILE>& run) {
        for (int32_t i = run.first_tile; i < run.end_tile; ++i) {
            add(list, Tile(p, list, run, i), run.rows.num_tiles);
        }
    }

    // The sum over the threads before this one, and over all.
    __device__ __forceinline__ Taken before(ScanSmem& smem, Taken& all) const {
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
    const TileList& list;
    const RequestRows<ONE_TILE>& rows;
    const Tile tile;
    const int32_t share;
    const int32_t begin_cost;
    const int32_t end_cost;
    const int32_t part;  // that the tile begins in

    __device__ __forceinline__ TileWriter(
        const TileList& list,
        const RequestRows<ONE_TILE>& rows,
        const Tile& tile,
        int64_t cost,
        int32_t share)
        : list(list),
          rows(rows),
          tile(tile),
          share(share),
          begin_cost(static_cast<int32_t>(cost)),
          end_cost(begin_cost + tile.cost(list)),
          part(boundary(begin_cost)) {}

    // The last part that begins at a cost or before it.
    __device__ __forceinline__ int32_t boundary(int32_t cost) const {
        return static_cast<uint32_t>(cost) / static_cast<uint32_t>(share);
    }

    // Where in the tile part g begins, in steps, before it is moved to a whole round.
    __device__ __forceinline__ int32_t step(int32_t g) const {
        return ((g * share - begin_cost) << list.cost_bits) - list.item_cost;
    }

    __device__ __forceinline__ Item
    item(int32_t begin, int32_t end, int32_t item_idx, int32_t num, int32_t slot, int32_t next_slot)
        const {
        const auto short_of = [](int32_t x) { return static_cast<uint16_t>(x); };
        return {rows.first_page,        rows.first_q_row,   rows.kv_len - rows.qo_len,
                tile.first_row,         tile.num_rows,      tile.first_token + begin,
                tile.first_token + end, short_of(item_idx), short_of(num),
                num > 1 ? slot : -1,    next_slot,          tile.mask_entry};
    }

    __device__ __forceinline__ void put(int64_t idx, const Item& item, int32_t first_of) const {
        if (idx < list.work.max_items) {
            list.work.items[idx] = item;
        }
        if (first_of >= 0 && first_of < list.work.num_parts) {
            list.work.first_items[first_of] = item;
        }
    }

    // Part g begins with items[begin], and the one before ends before items[end].
    __device__ __forceinline__ void put_part(int32_t g, int64_t begin, int64_t end) const {
        if (g < list.work.num_parts) {  // behind the last tile there is none
            list.work.part_begin[g] = min(begin, int64_t{list.work.max_items});
            list.work.part_end[g - 1] = min(end, int64_t{list.work.max_items});
        }
    }

    // Cuts the tile where parts begin. Such a beginning less than half a round before the tile's
    // end moves behind it, which the next tile knows by its cost alone; one no more than that
    // behind its start moves there; any other goes to the nearest round. No two meet, because a
    // share is two half_costs at least.
    __device__ __forceinline__ void cut_at_parts(int64_t tile_idx) const {
        const int32_t half = 1 << list.round_bits >> 1;
        const int32_t end_half = half_cost(list);
        // Parts behind the last begin with the next tile.
        const int32_t last = boundary(end_cost - end_half);
        const int32_t to_first = begin_cost + ((list.item_cost + half) >> list.cost_bits);
        const int32_t first = min(last, boundary(to_first));
        const auto token = [&](int32_t g) {  // half a round goes down
            const int32_t rounds = (step(g) + half - 1) >> list.round_bits;
            return rounds << (list.round_bits + list.step_bits);
        };
        for (int32_t g = part + 1; g <= first; ++g) {
            put(tile_idx + g - 1, Item{}, -1);
            put_part(g, tile_idx + g, tile_idx + g - 1);
        }
        const bool begins_part = first > part || begin_cost - part * share < end_half;
        for (int32_t g = first; g <= last; ++g) {
            const int32_t begin = g == first ? 0 : token(g);
            const int32_t end = g == last ? tile.num_tokens : token(g + 1);
            const bool is_first = g > first || begins_part;
            // A part leaves one state at its end and one at its start, if at all.
            const int32_t cut = first + 1, slot = list.work.num_parts + cut;
            put(tile_idx + g, item(begin, end, g - first, last - first + 1, slot, cut),
                is_first ? g : -1);
            if (g > first) {
                put_part(g, tile_idx + g, tile_idx + g);
            }
        }
        if (boundary(end_cost) > last) {
            put(tile_idx + last + 1, Item{}, -1);
            put_part(last + 1, tile_idx + last + 2, tile_idx + last + 1);
        }
    }

    __device__ __forceinline__ void cut_at_fixed_tokens(int64_t first_item, int64_t slot) const {
        const FixedItems items(list, tile, rows.num_tiles);
        // Too few slots are left only for tables that name pages or rows twice.
        const bool fits = items.num == 1 || slot + items.num <= list.work.max_slots;
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
            const int32_t token = max(step(g), 0) << list.step_bits;
            const int32_t i = min(token / items.tokens, items.num - 1);
            put_part(g, first_item + i, first_item + i);
            if (g < list.work.num_parts) {
                list.work.first_items[g] = item_at(i);
            }
        }
    }
};

// Registers for all that a thread knows of its request.
constexpr int MAX_THREADS = 512;

template <bool ONE_TILE, bool FIXED>
__global__ void __launch_bounds__(MAX_THREADS) plan(const __grid_constant__ PlanParams p) {
    __shared__ ScanSmem smem;
    __shared__ int32_t largest;  // cost of a tile of this CTA's requests
    griddepcontrol_wait();
    const bool is_second = !ONE_TILE && blockIdx.x >= p.num_ctas;
    const TileList& list = is_second ? p.second : p.first;
    const int32_t batch_size = static_cast<int32_t>(p.table.batch_size);
    const int32_t num_threads = blockDim.x;
    const int32_t cta_first = (blockIdx.x - (is_second ? p.num_ctas : 0)) * num_threads;
    const int32_t thread_idx = cta_first + threadIdx.x;
    const int32_t team_threads = batch_size << p.team_bits;
    const bool owned = thread_idx < team_threads;

    // 1 what this thread's tiles take, what all before them take, and all together
    const Run<ONE_TILE> run(p, list, owned ? thread_idx : 0);
    Taken<ONE_TILE, FIXED> own, all;
    if (owned) {
        own.add(p, list, run);
    }
    if (threadIdx.x == 0) {
        largest = 0;
    }
    Taken<ONE_TILE, FIXED> at = own.before(smem, all);
    if (!FIXED && list.cut_cost > 0) {
        atomicMax(&largest, own.largest);
        __syncthreads();  // all are in
    }
    if (p.num_ctas > 1) {
        Taken<ONE_TILE, FIXED> earlier, others, sum;  // of the CTAs before this one, of all
#pragma unroll(ONE_TILE && !FIXED ? 4 : 1)
        for (int32_t i = threadIdx.x; i < team_threads; i += num_threads) {
            Taken<ONE_TILE, FIXED> other;
            other.add(p, list, Run<ONE_TILE>(p, list, i));
            others.add(other);
            if (i < cta_first) {
                earlier.add(other);
            }
        }
        earlier.before(smem, sum);
        at.add(sum);
        others.before(smem, all);
    }
    const uint32_t parts = list.work.num_parts;
    const uint32_t even = (static_cast<uint32_t>(min(all.cost, MAX_COST)) + parts - 1) / parts;
    int32_t share = max(static_cast<int32_t>(even), 2 * half_cost(list));
    if constexpr (!FIXED) {
        if (list.cut_cost > 0 &&
            p.num_ctas == 1) {  // many more tiles than parts are hardly ever cut
            const uint32_t num_tiles = ONE_TILE ? batch_size : all.tiles;
            const int64_t whole = int64_t{largest} * ((num_tiles + parts - 1) / parts);
            share = whole > share + units(list, list.cut_cost)
                        ? share
                        : max(share, static_cast<int32_t>(whole));
        }
    }
    const bool dealt = all.cost <= MAX_COST;

    // 2 its items, and the parts that begin with them
    if (owned && dealt) {
        for (int32_t i = run.first_tile; i < run.end_tile; ++i) {
            const Tile tile(p, list, run, i);
            const TileWriter<ONE_TILE> writer(list, run.rows, tile, at.cost, share);
            if constexpr (FIXED) {
                writer.cut_at_fixed_tokens(at.fixed_items, at.fixed_slots);
            } else {
                writer.cut_at_parts(ONE_TILE ? thread_idx : at.tiles);
            }
            at.add(list, tile, run.rows.num_tiles);
        }
    }

    griddepcontrol_launch_dependents();
    // 3 the first part, the last, and those that are left without items; no ticket is taken
    const int32_t all_cost = static_cast<int32_t>(min(all.cost, MAX_COST));
    const int32_t last = dealt ? min(all_cost / share, list.work.num_parts - 1) : -1;
    const int64_t num_tiles = ONE_TILE ? batch_size : all.tiles;
    const int64_t end = FIXED ? all.fixed_items : num_tiles + last;
    const int32_t num_all = p.num_ctas * num_threads;
    for (int32_t g = thread_idx; g < list.work.num_parts; g += num_all) {
        if (g == 0 || g > last) {
            list.work.part_begin[g] = 0;
        }
        if (g >= last) {
            list.work.part_end[g] = g == last ? min(end, int64_t{list.work.max_items}) : 0;
        }
    }
    const int32_t num_tickets = (list.work.max_slots + 2) * list.work.num_kv_heads;
    for (int32_t i = thread_idx; i < num_tickets; i += num_all) {
        list.work.tickets[i] = 0;
    }
}

}  // namespace cukv
