// mask_tiles -- classify the tiles of custom masks, list those that are not empty, store their
// bits.
//
//   seen[i, j] = mask[i, j] and (window_left < 0 or j >= i + kv_len - qo_len - window_left)
//
// for query i and key j of a request; common/mask.cuh says what becomes of it. Elements outside a
// mask, or past the end of its data, count as False and are not read. There may be two work lists,
// with tiles of their own; half of the CTAs take each. A CTA owns a tile of packed rows at a time:
// a warp classifies every WARPS-th step of its keys, four lanes per query, then the first warp
// lists the steps. Bound by HBM: the mask, once for each of the group's tiles that share its
// queries.
// Host: cukv/_plan.py Plan.update       Reference: cukv/reference.py visible
#include "common/bits.cuh"
#include "common/scan.cuh"
#include "common/tiles.cuh"

namespace cukv {

// Masks of all requests, in the caller's memory.
struct MaskSource {
    const char* data;  // of requests one after the other: bytes of truth, or bits
    int64_t stride;    // bytes from one byte to the next, may be negative
    int64_t size;      // bytes
    Index qo_indptr;   // [batch_size + 1] rows of the masks
    Index kv_indptr;   // [batch_size + 1] keys of the masks
    Index indptr;      // [batch_size + 1] where each request's bits start, in bytes, or not given
};

struct MaskTilesParams {
    PageTable table;
    Index qo_indptr;  // [batch_size + 1] rows of q
    TileList first;
    TileList second;
    MaskSource source;
    Divisor group;  // by group_size
    int32_t num_q_rows;
    int32_t num_ctas;     // of a list
    int32_t window_left;  // -1: off
};

static_assert(
    sizeof(MaskTilesParams) == PARAMS_BYTES, "host and device disagree on the parameters");

constexpr int MASK_THREADS = 256;
constexpr int WARPS = MASK_THREADS / WARP_SIZE;
constexpr int MAX_STEPS = 1024;  // classified before they are listed

__device__ __forceinline__ int32_t num_mask_steps(int32_t kv_len) {
    return (kv_len + MASK_STEP - 1) / MASK_STEP;
}

// A request's mask. BITS: its data are bits, not bytes of truth.
template <bool BITS>
struct MaskRows {
    const MaskSource& source;
    int64_t start;  // of the request, bytes
    int64_t qo_len, kv_len;

    // `start` is where the mask begins if each begins where the one before ends.
    __device__ __forceinline__
    MaskRows(const MaskSource& source, int32_t request_idx, int64_t start = 0)
        : source(source), start(start) {
        qo_len = source.qo_indptr[request_idx + 1] - source.qo_indptr[request_idx];
        kv_len = source.kv_indptr[request_idx + 1] - source.kv_indptr[request_idx];
        if (BITS && source.indptr.given()) {
            this->start = source.indptr[request_idx];
        }
    }

    // Bytes that a mask of its lengths has.
    __device__ __forceinline__ int64_t num_bytes() const {
        const int64_t elements = qo_len > 0 && kv_len > 0 ? qo_len * kv_len : 0;
        return BITS ? (elements + 7) / 8 : elements;
    }

    // Byte i of the data, of which there may be none.
    __device__ __forceinline__ uint32_t byte(int64_t i) const {
        const bool there = i >= 0 && i < source.size;
        return there ? static_cast<uint8_t>(source.data[i * source.stride]) : 0;
    }

    // Whether the aligned words that hold bytes [first, first + num) lie inside the data.
    __device__ __forceinline__ bool has_words(int64_t first, int num) const {
        const int64_t before = reinterpret_cast<uint64_t>(source.data + first) % 4;
        return source.stride == 1 && first >= before && first <= source.size - num - 4;
    }

    // Bit b: row i has key j + b, for 32 keys.
    __device__ __forceinline__ uint32_t word(int64_t i, int64_t j) const {
        const uint32_t inside = i < qo_len ? low_bits(clamp(kv_len - j, 0, 32)) : 0;
        if (inside == 0) {
            return 0;
        }
        const int64_t element = i * kv_len + j;
        return (BITS ? bits_at(element) : truth_at(start + element)) & inside;
    }

    __device__ __forceinline__ uint32_t bits_at(int64_t element) const {
        const int64_t first = start + element / 8;
        int shift = element % 8;
        if (has_words(first, 5)) {
            const char* from = source.data + first;
            const int before = reinterpret_cast<uint64_t>(from) % 4;
            const uint32_t* words = reinterpret_cast<const uint32_t*>(from - before);
            return __funnelshift_r(words[0], words[1], 8 * before + shift);
        }
        uint64_t bits = 0;
        for (int k = 0; k < 5; ++k) {
            bits |= uint64_t{byte(first + k)} << 8 * k;
        }
        return static_cast<uint32_t>(bits >> shift);
    }

    __device__ __forceinline__ uint32_t truth_at(int64_t first) const {
        uint32_t bits = 0;
        if (has_words(first, 32)) {
            const char* from = source.data + first;
            const int before = reinterpret_cast<uint64_t>(from) % 4;
            const uint32_t* words = reinterpret_cast<const uint32_t*>(from - before);
            uint32_t x[9];
#pragma unroll
            for (int k = 0; k < 9; ++k) {
                x[k] = words[k];
            }
#pragma unroll
            for (int k = 0; k < 8; k += 2) {
                const uint32_t low = __funnelshift_r(x[k], x[k + 1], 8 * before);
                const uint32_t high = __funnelshift_r(x[k + 1], x[k + 2], 8 * before);
                bits |= pack_8(low, high) >> 7 << 4 * k;
            }
            return bits;
        }
        for (int k = 0; k < 32; ++k) {
            bits |= (byte(first + k) != 0 ? 1u : 0u) << k;
        }
        return bits;
    }
};

// A tile of packed rows of a request.
struct MaskedTile {
    const MaskTiles& to;
    int32_t first_q, last_q;
    int32_t kv_len;
    int32_t first_key;  // that the first query's window holds, may be negative
    int32_t first_entry;

    // Tile tile_idx of a request whose first has its steps' entries from first_of_all on.
    __device__ __forceinline__ MaskedTile(
        const MaskTilesParams& p,
        const TileList& list,
        const RequestRows<false>& rows,
        int32_t tile_idx,
        int64_t first_of_all)
        : to(list.work.mask), kv_len(rows.kv_len) {
        const int32_t first_row = tile_idx << list.row_bits;
        const int32_t end_row = min(first_row + list.rows_per_tile(), rows.packed_rows);
        first_q = p.group.quotient(first_row);
        last_q = p.group.quotient(end_row - 1);
        first_key = kv_len - rows.qo_len + first_q - p.window_left;
        if (p.window_left < 0) {
            first_key = -list.rows_per_tile();  // at or below 0 for all queries
        }
        const int64_t first = first_of_all + int64_t{tile_idx} * num_mask_steps(kv_len);
        first_entry = static_cast<int32_t>(min(first, int64_t{to.max_entries}));
    }

    // Whether there is room for all its steps.
    __device__ __forceinline__ bool fits() const {
        return first_entry + num_mask_steps(kv_len) <= to.max_entries;
    }

    // Stores the bits of a step, by a warp, and gives the classes of its halves.
    template <bool BITS>
    __device__ __forceinline__ int32_t classify(const MaskRows<BITS>& mask, int32_t step) const {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        const int word_idx = lane_idx % MASK_WORDS;
        const int32_t key = step * MASK_STEP + word_idx * 32;
        const uint32_t keys = low_bits(kv_len - key);
        uint32_t* words = to.words + int64_t{first_entry + step} * to.tile_queries * MASK_WORDS;
        bool any = false, all = true;
        for (int i = lane_idx / MASK_WORDS; i < to.tile_queries; i += WARP_SIZE / MASK_WORDS) {
            uint32_t seen = 0;
            if (first_q + i <= last_q) {
                seen = mask.word(first_q + i, key) & keys;
                seen &= ~low_bits(first_key + i - key);
                any = any || seen != 0;
                all = all && seen == keys;
            }
            words[i * MASK_WORDS + word_idx] = seen;
        }
        const uint32_t some = __ballot_sync(0xffffffffu, any);
        const uint32_t whole = __ballot_sync(0xffffffffu, all);
        int32_t classes = 0;
#pragma unroll
        for (int half_idx = 0; half_idx < 2; ++half_idx) {
            const uint32_t lanes = 0x33333333u << 2 * half_idx;  // whose words are of the half
            const bool full = (whole & lanes) == lanes;
            const int32_t found = (some & lanes) == 0 ? EMPTY : full ? FULL : MIXED;
            classes |= found << 2 * half_idx;
        }
        return classes;
    }
};

// Requests of which a CTA looks up the tiles together.
struct Smem {
    ScanSmem scan;
    int32_t first_tile[MASK_THREADS];   // of each request, among all requests' tiles
    int64_t first_entry[MASK_THREADS];  // likewise
    int64_t first_byte[MASK_THREADS];   // of its mask
    uint8_t classes[MAX_STEPS];

    // The last request whose tiles begin at `tile` or before it.
    __device__ __forceinline__ int request_of(int32_t tile) const {
        int low = 0, high = MASK_THREADS - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            const bool before = first_tile[middle] <= tile;
            low = before ? middle : low;
            high = before ? high : middle - 1;
        }
        return low;
    }
};

// Lists the classified steps [first, first + num), by a warp; gives how many entries there are now.
__device__ __forceinline__ int32_t
list_steps(const Smem& smem, int32_t* entries, int32_t listed, int32_t first, int32_t num) {
    const int lane_idx = threadIdx.x % WARP_SIZE;
    for (int32_t base = 0; base < num; base += WARP_SIZE) {
        const int32_t i = base + lane_idx;
        const int32_t classes = i < num ? smem.classes[i] : 0;
        const uint32_t votes = __ballot_sync(0xffffffffu, classes != 0);
        if (classes != 0) {
            entries[listed + __popc(votes & ((1u << lane_idx) - 1))] = (first + i) << 4 | classes;
        }
        listed += __popc(votes);
    }
    return listed;
}

// Classifies and lists the steps of a tile, by a CTA. Gives the listed keys, to thread 0.
template <bool BITS>
__device__ __forceinline__ int32_t
list_tile(Smem& smem, const MaskedTile& tile, const MaskRows<BITS>& mask) {
    const int warp_idx = threadIdx.x / WARP_SIZE;
    const int32_t steps = num_mask_steps(tile.kv_len);
    int32_t listed = 0, last_classes = 0;
    for (int32_t first = 0; first < steps; first += MAX_STEPS) {
        const int32_t num = min(steps - first, MAX_STEPS);
        for (int32_t i = warp_idx; i < num; i += WARPS) {
            const int32_t classes = tile.classify(mask, first + i);
            if (threadIdx.x % WARP_SIZE == 0) {
                smem.classes[i] = classes;
            }
        }
        __syncthreads();  // classes are there
        last_classes = smem.classes[num - 1];
        if (warp_idx == 0) {
            listed = list_steps(smem, tile.to.entries + tile.first_entry, listed, first, num);
        }
        __syncthreads();  // classes have been read
    }
    return listed * MASK_STEP - (last_classes != 0 ? steps * MASK_STEP - tile.kv_len : 0);
}

template <bool BITS>
__global__ void __launch_bounds__(MASK_THREADS, 2)
    mask_tiles(const __grid_constant__ MaskTilesParams p) {
    __shared__ Smem smem;
    griddepcontrol_wait();
    const bool is_second = blockIdx.x >= p.num_ctas;
    const TileList& list = is_second ? p.second : p.first;
    const MaskTiles& to = list.work.mask;
    const int32_t batch_size = static_cast<int32_t>(p.table.batch_size);

    int64_t num_tiles = 0, num_entries = 0, num_bytes = 0;  // of all requests before
    int32_t tile_of_all = blockIdx.x - (is_second ? p.num_ctas : 0);
    for (int32_t base = 0; base < batch_size; base += MASK_THREADS) {
        // 1 where the tiles, entries and masks of the next requests are
        const int32_t request_idx = base + threadIdx.x;
        int64_t tiles = 0, entries = 0, bytes = 0;
        if (request_idx < batch_size) {
            const RequestRows<false> rows(p, list, request_idx);
            tiles = rows.num_tiles;
            entries = tiles * num_mask_steps(rows.kv_len);
            bytes = MaskRows<BITS>(p.source, request_idx).num_bytes();
        }
        int64_t all_tiles, all_entries, all_bytes;
        smem.first_tile[threadIdx.x] = num_tiles + cta_exclusive_sum(smem.scan, tiles, all_tiles);
        smem.first_entry[threadIdx.x] =
            num_entries + cta_exclusive_sum(smem.scan, entries, all_entries);
        smem.first_byte[threadIdx.x] = num_bytes + cta_exclusive_sum(smem.scan, bytes, all_bytes);
        __syncthreads();  // all of them are there
        num_tiles += all_tiles;
        num_entries += all_entries;
        num_bytes += all_bytes;

        // 2 every num_ctas-th of the tiles
#pragma unroll 1
        for (; tile_of_all < num_tiles; tile_of_all += p.num_ctas) {
            const int idx = smem.request_of(tile_of_all);
            const RequestRows<false> rows(p, list, base + idx);
            const MaskRows<BITS> mask(p.source, base + idx, smem.first_byte[idx]);
            const int32_t tile_idx = tile_of_all - smem.first_tile[idx];
            const MaskedTile tile(p, list, rows, tile_idx, smem.first_entry[idx]);
            // Too many steps are those of masks with too few elements only.
            const int32_t listed = tile.fits() ? list_tile(smem, tile, mask) : 0;
            if (threadIdx.x == 0) {
                const int32_t at = to.first_tile(base + idx, rows.first_q_row, p.group.divisor);
                to.tiles[at + tile_idx] = {tile.first_entry, listed};
            }
        }
        __syncthreads();  // the requests have been read
    }
    griddepcontrol_launch_dependents();
}

}  // namespace cukv
