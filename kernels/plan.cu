// plan -- deal the tiles of an attention call to CTAs: the work list, from the present lengths.
//
//   cost of a tile = item_cost + steps of step_tokens keys that some row of it sees
//   part g begins where the prefix sum of costs reaches g * share, at a whole round of steps
//
// So every part has an equal share, and a tile is cut only where a part begins inside it. With
// fixed_item_tokens a tile is cut at multiples of it instead, whatever else is in the batch.
// One CTA. A thread owns a request at a time: its tiles' costs, then its items. Bound by latency.
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
    int32_t num_q_rows;
    int32_t reserved;
    Divisor group;           // by group_size
    Divisor rows_per_tile;   // packed rows
    int32_t step_bits;       // log2 of the tokens of a warp's step
    int32_t round_bits;      // log2 of the steps that a CTA's warps take side by side
    int32_t item_cost;       // steps that an item costs beside its keys
    int32_t fixed_item_tokens;  // 0: items end where parts do
    int32_t max_fixed_items;    // of a request, where items are fixed
    int32_t causal;
    int32_t window_left;  // -1: off
};

static_assert(sizeof(PlanParams) == PARAMS_BYTES, "host and device disagree on the parameters");

constexpr int64_t MAX_TOKENS = 0x7f000000;  // per request; the rest of int32 is for rounding up
constexpr int64_t MAX_COST = 0x7f000000;    // of all tiles that are dealt

__device__ __forceinline__ int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return min(max(x, low), high);
}

// A request's rows and keys as the work list may name them: inside q and `indices`. ONE_TILE: no
// request has more than one tile, so that the loops over tiles are none.
template <bool ONE_TILE>
struct RequestRows {
    int64_t first_page;
    int32_t first_q_row;
    int32_t kv_len;
    int32_t qo_len;
    int32_t packed_rows;
    int32_t num_tiles;

    __device__ __forceinline__ RequestRows(const PlanParams& p, int64_t request_idx) {
        const Request request = p.table.request(request_idx);
        first_page = clamp(request.first_page, 0, p.table.indices.size);
        const int64_t pages = clamp(request.end_page, first_page, p.table.indices.size) - first_page;
        const int64_t last = clamp(request.last_page_len, 0, p.table.page_size);
        kv_len = pages > 0 ? min((pages - 1) * p.table.page_size + last, MAX_TOKENS) : 0;
        first_q_row = request_idx;
        qo_len = 1;
        if (p.qo_indptr.given()) {
            first_q_row = clamp(p.qo_indptr[request_idx], 0, p.num_q_rows);
            qo_len = clamp(p.qo_indptr[request_idx + 1], first_q_row, p.num_q_rows) - first_q_row;
        }
        packed_rows = qo_len * p.group.divisor;
        num_tiles =
            ONE_TILE ? 1 : p.rows_per_tile.quotient(packed_rows + p.rows_per_tile.divisor - 1);
    }
};

// Keys that some row of a tile sees.
struct Tile {
    int32_t first_row;
    int32_t num_rows;
    int32_t first_token;
    int32_t num_tokens;
    int32_t num_steps;

    template <bool ONE_TILE>
    __device__ __forceinline__
    Tile(const PlanParams& p, const RequestRows<ONE_TILE>& rows, int32_t idx) {
        first_row = idx * p.rows_per_tile.divisor;
        num_rows = min(static_cast<int32_t>(p.rows_per_tile.divisor), rows.packed_rows - first_row);
        const int64_t diagonal = int64_t{rows.kv_len} - rows.qo_len;  // of row 0
        const int64_t first_q = p.group.quotient(first_row);
        const int64_t last_q = p.group.quotient(first_row + num_rows - 1);
        const int64_t first = p.window_left < 0 ? 0 : diagonal + first_q - p.window_left;
        const int64_t end = p.causal ? diagonal + last_q + 1 : rows.kv_len;
        first_token = clamp(first, 0, rows.kv_len);
        num_tokens = max(clamp(end, 0, rows.kv_len) - first_token, int64_t{0});
        num_steps = (num_tokens + (1 << p.step_bits) - 1) >> p.step_bits;
    }
};

// Where in a tile parts begin: part first + j, for j < num, before its first key if j < at_start,
// after its last if j >= num - at_end, and else between. No two begin at one key between, because a
// share is a round at least.
struct Cuts {
    int32_t first;
    int32_t num;
    int32_t at_start;
    int32_t at_end;
    int32_t shift;  // steps from the start of the list to the tile's first
    int32_t share;

    __device__ __forceinline__ Cuts(
        const PlanParams& p, const Tile& tile, int64_t cost, int32_t share)
        : first(0), num(0), at_start(0), at_end(0), shift(0), share(share) {
        const int64_t end_cost = cost + p.item_cost + tile.num_steps;
        if (end_cost > MAX_COST) {  // only of tables that no builder makes
            return;
        }
        const int32_t round = 1 << p.round_bits;
        const int32_t rounds = (tile.num_steps + round - 1) >> p.round_bits;
        shift = static_cast<int32_t>(cost) + p.item_cost;
        const int32_t before = static_cast<uint32_t>(cost) / share;
        first = before + 1;
        num = static_cast<uint32_t>(end_cost) / share - before;
        // Steps are rounded to the nearest round: half a round or more goes up.
        const uint32_t to_start = shift + round - round / 2 - 1;
        const uint32_t to_last = shift + rounds * round - round / 2 - 1;
        at_start = rounds == 0 ? num : min(num, static_cast<int32_t>(to_start / share) - before);
        at_end = rounds == 0 ? 0 : max(0, num - (static_cast<int32_t>(to_last / share) - before));
    }

    // Token of the tile at which part first + j begins, for j >= at_start.
    __device__ __forceinline__ int32_t token(const PlanParams& p, int32_t j) const {
        const int32_t round = 1 << p.round_bits;
        const int32_t steps = (first + j) * share - shift + round / 2;
        return steps >> p.round_bits << (p.round_bits + p.step_bits);
    }
};

// How one tile becomes items.
struct TileItems {
    Tile tile;
    Cuts cuts;
    int32_t num;
    int32_t fixed_tokens;  // 0: items end where parts do

    template <bool ONE_TILE>
    __device__ __forceinline__ TileItems(
        const PlanParams& p,
        const RequestRows<ONE_TILE>& rows,
        int32_t tile_idx,
        int64_t cost,
        int32_t share)
        : tile(p, rows, tile_idx), cuts(p, tile, cost, share), fixed_tokens(0) {
        if (p.fixed_item_tokens == 0) {
            num = cuts.num - cuts.at_start - cuts.at_end + 1;
            return;
        }
        const int32_t round_tokens = 1 << (p.round_bits + p.step_bits);
        const int32_t most = max(p.max_fixed_items / rows.num_tiles, 1);
        const int32_t least = (tile.num_tokens + most - 1) / most;
        fixed_tokens = max((least + round_tokens - 1) & -round_tokens, p.fixed_item_tokens);
        num = max((tile.num_tokens + fixed_tokens - 1) / fixed_tokens, 1);
    }

    // First token of item i; that of item `num` is the tile's end.
    __device__ __forceinline__ int32_t begin(const PlanParams& p, int32_t i) const {
        if (i == 0 || i == num) {
            return i == 0 ? 0 : tile.num_tokens;
        }
        return fixed_tokens != 0 ? i * fixed_tokens : cuts.token(p, cuts.at_start + i - 1);
    }

    // Item with which part cuts.first + j begins; `num`: the next tile's first.
    __device__ __forceinline__ int32_t of_part(const PlanParams& p, int32_t j) const {
        if (j < cuts.at_start || j >= cuts.num - cuts.at_end) {
            return j < cuts.at_start ? 0 : num;
        }
        const int32_t token = cuts.token(p, j);
        return fixed_tokens != 0 ? min((token + fixed_tokens - 1) / fixed_tokens, num)
                                 : j - cuts.at_start + 1;
    }

    // Whether a part begins with the tile's last key behind it.
    __device__ __forceinline__ bool ends_part(const PlanParams& p) const {
        return cuts.num > 0 && of_part(p, cuts.num - 1) == num;
    }
};

// Writes a tile's items, the parts that begin in it, and part `with_tile`, if that is not -1, which
// begins with its first item.
template <bool ONE_TILE>
__device__ __forceinline__ void write_items(
    const PlanParams& p,
    const RequestRows<ONE_TILE>& rows,
    const TileItems& items,
    int64_t first_item,
    int64_t first_slot,
    int32_t with_tile) {
    // Beyond the capacity are only tables that name pages or rows twice: nothing is promised there.
    const bool has_slots = items.num == 1 || first_slot + items.num <= p.work.max_slots;
    const auto item_at = [&](int32_t i) {
        return Item{
            rows.first_page,
            rows.first_q_row,
            rows.kv_len - rows.qo_len,
            items.tile.first_row,
            has_slots ? items.tile.num_rows : 0,
            items.tile.first_token + items.begin(p, i),
            items.tile.first_token + items.begin(p, i + 1),
            items.num == 1 ? -1 : static_cast<int32_t>(first_slot),
            i,
            items.num,
            0};
    };
    for (int32_t i = 0; i < items.num && first_item + i < p.work.max_items; ++i) {
        p.work.items[first_item + i] = item_at(i);
    }
    for (int32_t j = 0; j < items.cuts.num; ++j) {
        const int32_t part = items.cuts.first + j, i = items.of_part(p, j);
        if (part <= p.work.num_parts) {
            p.work.part_indptr[part] = min(first_item + i, int64_t{p.work.max_items});
        }
        if (part < p.work.num_parts && i < items.num) {
            p.work.first_items[part] = item_at(i);
        }
    }
    if (with_tile >= 0 && with_tile < p.work.num_parts) {
        p.work.first_items[with_tile] = item_at(0);
    }
}

// Carries what is known of the last tile from the requests before to each thread's own.
struct LastTile {
    static constexpr int NONE = 0, ENDS_NO_PART = 1, ENDS_PART = 2;

    int of_warp[SCAN_THREADS / WARP_SIZE];
    int before_all;

    // The last tile before this thread's request, NONE if there is none; `own` is of the request.
    __device__ __forceinline__ int before(int own) {
        const int warp_idx = threadIdx.x / WARP_SIZE, lane_idx = threadIdx.x % WARP_SIZE;
        const uint32_t lanes = __ballot_sync(0xffffffffu, own != NONE);
        const uint32_t lower = lanes & ((1u << lane_idx) - 1);
        const int last_lane = lower == 0 ? 0 : 31 - __clz(lower);
        const int of_lane = __shfl_sync(0xffffffffu, own, last_lane);
        const int of_last = __shfl_sync(0xffffffffu, own, lanes == 0 ? 0 : 31 - __clz(lanes));
        if (lane_idx == 0) {
            of_warp[warp_idx] = lanes == 0 ? NONE : of_last;
        }
        __syncthreads();  // of_warp is whole
        int found = lower == 0 ? NONE : of_lane;
        for (int i = warp_idx - 1; i >= 0 && found == NONE; --i) {
            found = of_warp[i];
        }
        return found == NONE ? before_all : found;
    }

    // Takes the last tile of all threads' requests to be before those that come next.
    __device__ __forceinline__ void advance() {
        __syncthreads();  // before_all has been read
        if (threadIdx.x == 0) {
            for (int i = blockDim.x / WARP_SIZE - 1; i >= 0; --i) {
                if (of_warp[i] != NONE) {
                    before_all = of_warp[i];
                    break;
                }
            }
        }
        __syncthreads();  // and is new
    }
};

template <bool ONE_TILE>
__global__ void __launch_bounds__(SCAN_THREADS) plan(const __grid_constant__ PlanParams p) {
    __shared__ ScanSmem smem;
    __shared__ LastTile last_tile;
    const int32_t num_threads = blockDim.x;
    if (threadIdx.x == 0) {
        last_tile.before_all = LastTile::ENDS_PART;  // part 0 begins with the first tile
    }

    // 1 total cost, and from it the share of a part
    int64_t own = 0, total;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < p.table.batch_size; i += num_threads) {
        const RequestRows<ONE_TILE> rows(p, i);
        for (int32_t tile_idx = 0; tile_idx < rows.num_tiles; ++tile_idx) {
            own += Tile(p, rows, tile_idx).num_steps + p.item_cost;
        }
    }
    for (int32_t i = threadIdx.x; i < p.work.max_slots * p.work.num_kv_heads; i += num_threads) {
        p.work.tickets[i] = 0;
    }
    cta_exclusive_sum(smem, own, total);
    const uint32_t dealt = min(total, MAX_COST), parts = p.work.num_parts;
    const int32_t share = max((dealt + parts - 1) / parts, 1u << p.round_bits);

    // 2 items, of a request per thread at a time
    int64_t cost = 0, num_items = 0, num_slots = 0;  // of the requests before
    for (int64_t base = 0; base < p.table.batch_size; base += num_threads) {
        const int64_t request_idx = base + threadIdx.x;
        const bool owned = request_idx < p.table.batch_size;
        const RequestRows<ONE_TILE> rows(p, owned ? request_idx : 0);
        const int32_t num_tiles = owned ? rows.num_tiles : 0;
        own = 0;
        for (int32_t tile_idx = 0; tile_idx < num_tiles; ++tile_idx) {
            own += Tile(p, rows, tile_idx).num_steps + p.item_cost;
        }
        const int64_t first_cost = cost + cta_exclusive_sum(smem, own, total);
        cost += total;

        own = 0;  // slots above, items below
        int64_t at = first_cost;
        int last = LastTile::NONE;
        for (int32_t tile_idx = 0; tile_idx < num_tiles; ++tile_idx) {
            const TileItems items(p, rows, tile_idx, at, share);
            own += items.num + (items.num > 1 ? int64_t{items.num} << 32 : 0);
            at += items.tile.num_steps + p.item_cost;
            last = items.ends_part(p) ? LastTile::ENDS_PART : LastTile::ENDS_NO_PART;
        }
        const int64_t before = cta_exclusive_sum(smem, own, total);
        int64_t item = num_items + static_cast<uint32_t>(before);
        int64_t slot = num_slots + (before >> 32);
        num_items += static_cast<uint32_t>(total);
        num_slots += total >> 32;

        last = last_tile.before(last);
        at = first_cost;
        for (int32_t tile_idx = 0; tile_idx < num_tiles; ++tile_idx) {
            const TileItems items(p, rows, tile_idx, at, share);
            const bool begins_part = last == LastTile::ENDS_PART;
            const int32_t part = static_cast<uint32_t>(min(at, MAX_COST)) / share;
            const int32_t with_tile = begins_part ? part : -1;
            write_items(p, rows, items, item, slot, with_tile);
            item += items.num;
            slot += items.num > 1 ? items.num : 0;
            at += items.tile.num_steps + p.item_cost;
            last = items.ends_part(p) ? LastTile::ENDS_PART : LastTile::ENDS_NO_PART;
        }
        if (base + num_threads < p.table.batch_size) {
            last_tile.advance();
        }
    }

    // 3 the first part, and those after the last tile
    for (int32_t part = threadIdx.x; part <= p.work.num_parts; part += num_threads) {
        if (part == 0 || int64_t{part} * share > min(cost, MAX_COST)) {
            p.work.part_indptr[part] = part == 0 ? 0 : min(num_items, int64_t{p.work.max_items});
        }
    }
}

}  // namespace cukv
