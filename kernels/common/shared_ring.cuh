// Keys and values of a part in two buffers, which all warps of a CTA fill and read together.
//
// Of each step a warp copies rows of its own, in three parts, each while another step is computed:
// page ids are looked up (of step n + 3 while step n is computed), rows found by them (n + 2) and
// copied (n + 1). All three are short runs of instructions without a branch, which go between the
// products of the step. What one step writes for the next lies apart from what it reads, by the
// parity of the step that it is about, so that lanes do not wait for each other. Ids and rows come
// by asynchronous copies: one wait a step, and no register is held for any.
//
//   row of a step = own row i / R * R * WARPS + warp * R + i % R, of R rows that are copied at once
//
// Eight lanes copy a row, 128 bytes at a time: with more of them a lane would have more rows to
// look up. A warp's rows are a multiple of 8 apart, if not neighbours: then a lane's addresses in a
// buffer, swizzled as they are, differ by constants.
#pragma once
#include "common/kv_ring.cuh"

namespace cukv {

// Starts copying an entry of an array to shared memory, by a lane that is given one.
__device__ __forceinline__ void copy_entry(
    IndexEntry& to, const Index& array, int64_t i, bool is_given) {
    const char* from = static_cast<const char*>(array.data) + i * array.stride;
    cp_async_4_if(is_given, smem_address(&to.low), from);
    cp_async_4_if(is_given && array.width == 8, smem_address(&to.high), from + 4);
}

// Goes on to the next item of a part that has keys, and calls enter(item) if there is one.
template <typename Enter>
__device__ __forceinline__ void next_with_keys(
    const WorkList& work, int32_t& item_idx, int32_t end_item, Enter enter) {
    while (++item_idx < end_item) {
        const Item& item = work.items[item_idx];
        if (item.first_token < item.end_token) {
            enter(item);
            break;
        }
    }
}

// Geometry of a buffer: rows of keys, and behind them rows of values, both swizzled.
template <typename KV_, int HEAD_DIM_QK, int HEAD_DIM_VO, int TOKENS_, int WARPS_>
struct SharedRing {
    using KV = KV_;
    static constexpr int TOKENS = TOKENS_, WARPS = WARPS_, STAGES = 2, OWN_ROWS = TOKENS / WARPS;
    static constexpr int K_ROW_BYTES = HEAD_DIM_QK * sizeof(KV);
    static constexpr int V_ROW_BYTES = HEAD_DIM_VO * sizeof(KV);
    static constexpr int V_OFFSET = TOKENS * K_ROW_BYTES;  // bytes
    static constexpr int BYTES = V_OFFSET + TOKENS * V_ROW_BYTES;

    static constexpr int LANES = 8, SPAN = LANES * 16;  // bytes of a row that are copied at once
    static constexpr int R = WARP_SIZE / LANES, GROUPS = OWN_ROWS / R;
    static_assert(R * WARPS % 8 == 0, "a warp's rows are swizzled alike");
    static_assert(2 * OWN_ROWS <= WARP_SIZE, "a lane finds a row of keys or of values");

    // Which row of a step a warp's own row i is.
    static __device__ __forceinline__ int row(int i) {
        return i / R * R * WARPS + tid_x() / WARP_SIZE * R + i % R;
    }

    // Keys or values.
    struct alignas(16) Cache {
        const char* base;  // of the KV head, in page 0
        int64_t page_stride;
        int64_t token_stride;
        int64_t num_pages;  // that both keys and values have
    };

    // What all warps share.
    struct Buffers {
        alignas(1024) char bytes[STAGES][BYTES];
        Cache caches[2];
        alignas(16) uint8_t keys[4][TOKENS];  // of four steps in turn, 1: the row is a key

        // Whether both of a lane's two neighbouring rows of a step are keys.
        __device__ __forceinline__ bool are_keys(uint32_t step) const {
            static_assert(TOKENS == 2 * WARP_SIZE, "a lane has two rows");
            const auto* pairs = reinterpret_cast<const uint16_t*>(keys[step % 4]);
            return pairs[tid_x() % WARP_SIZE] == 0x0101;
        }

        // Bit t, whether row t of a step is a key.
        __device__ __forceinline__ uint64_t
        key_bits(uint32_t step, int32_t /* num_tokens */) const {
            uint64_t bits = 0;
#pragma unroll
            for (int token = 0; token < TOKENS; token += WARP_SIZE) {
                const bool is_key = keys[step % 4][token + tid_x() % WARP_SIZE];
                bits |= uint64_t{__ballot_sync(0xffffffffu, is_key)} << token;
            }
            return bits;
        }
    };

    struct RowPlace {
        IndexEntry page;  // that was looked up; -1: of no key
        uint32_t entry;   // of the row within it
    };

    // What a warp knows of steps to come, by their parity; in shared memory because steps need all
    // registers.
    struct Own {
        struct alignas(16) {
            const char* begin[2];  // of a row of keys, of a row of values
            int32_t is_key;
        } rows[2][OWN_ROWS];
        RowPlace places[2][OWN_ROWS];
        StepPlace place[2];  // of the step whose ids are looked up next
    };
};

// Fills the buffers of a part. Params: table, work, k_cache, v_cache, head_dim, head_dim_vo.
template <typename Ring, bool ALIGNED, typename Params>
struct SharedLoader {
    using KV = typename Ring::KV;
    static constexpr int OWN_ROWS = Ring::OWN_ROWS;

    const Params& p;
    typename Ring::Buffers& buffers;
    typename Ring::Own& own;

    // By one thread, before any step.
    static __device__ __forceinline__ void begin(
        const Params& p, typename Ring::Buffers& buffers, int kv_head) {
        const Pages* const caches[2] = {&p.k_cache, &p.v_cache};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Pages& cache = *caches[i];
            buffers.caches[i] = {
                cache.base + kv_head * cache.head_stride, cache.page_stride, cache.token_stride,
                min(p.k_cache.max_num_pages, p.v_cache.max_num_pages)};
        }
    }

    // At the first step of a part; `first` is items[first_item].
    __device__ __forceinline__ SharedLoader(
        const Params& p,
        typename Ring::Buffers& buffers,
        typename Ring::Own& own,
        const Item& first,
        int32_t first_item,
        int32_t end_item)
        : p(p), buffers(buffers), own(own) {
        own.place[0] = {first_item,       end_item,        first.first_page,
                        first.mask_entry, first.end_token, first.first_token};
        if (first.first_token >= first.end_token) {
            leave(0);
        }
    }

    // Starts copying step 0, and looks up what this and the ones behind it need.
    __device__ __forceinline__ void start() const {
#pragma unroll
        for (int n = -3; n < 0; ++n) {
            cp_async_commit_group();
            cp_async_wait_group<0>();
            __syncwarp();  // what was looked up
            if (n == -1) {
                load(n);
                continue;
            }
            const Known known = know(n);
            __syncwarp();  // every lane has read what look_up() writes anew
            if (n == -2) {
                find(known, n + 2);
            }
            if (look_up(known, n + 3)) {
                leave(n + 4);
            }
        }
    }

    // All that goes with step `step`, at once.
    __device__ __forceinline__ void load(uint32_t step) const {
        copy(step + 1);
        const Known known = know(step);
        __syncwarp();  // every lane has read what look_up() writes anew
        find(known, step + 2);
        if (look_up(known, step + 3)) {
            leave(step + 4);
        }
    }

    // Copies the rows of step `step` into its buffer. Rows that are no keys, and elements past a
    // row's end, become zeros. Copies of rows that are not aligned to 16 bytes are done when it
    // returns, and leave what is past a row's end.
    __device__ __forceinline__ void copy(uint32_t step) const {
        if constexpr (ALIGNED) {
            const Copies copies(*this, step);
#pragma unroll
            for (int i = 0; i < Ring::GROUPS; ++i) {
                copies.start(i);
            }
        } else {
            char* buffer = buffers.bytes[step % Ring::STAGES];
            copy_elements<0, Ring::K_ROW_BYTES>(buffer, step, p.head_dim);
            copy_elements<1, Ring::V_ROW_BYTES>(buffer + Ring::V_OFFSET, step, p.head_dim_vo);
        }
    }

    // The same in GROUPS parts: this lane's copies of rows of a step.
    struct Copies {
        const Params& p;
        const typename Ring::Own& own;
        uint32_t k_to, v_to;
        uint32_t parity;
        int first, chunk_byte;

        __device__ __forceinline__ Copies(const SharedLoader& loader, uint32_t step)
            : p(loader.p), own(loader.own), parity(step % 2) {
            const int lane_idx = tid_x() % WARP_SIZE, chunk = lane_idx % Ring::LANES;
            first = lane_idx / Ring::LANES;
            chunk_byte = chunk * 16;
            const int row = Ring::row(first);
            k_to = smem_address(loader.buffers.bytes[step % Ring::STAGES]);
            v_to = k_to + Ring::V_OFFSET + swizzled<Ring::V_ROW_BYTES>(row, chunk);
            k_to += swizzled<Ring::K_ROW_BYTES>(row, chunk);
        }

        // What goes behind the n-th ldmatrix of keys.
        __device__ __forceinline__ void meanwhile(int n) const {
            if (n % 4 == 1 && n / 4 < Ring::GROUPS) {
                start(n / 4);
            }
        }

        // One of the parts.
        __device__ __forceinline__ void start(int i) const {
            const auto row = own.rows[parity][i * Ring::R + first];
            start_row<Ring::K_ROW_BYTES>(k_to, row.begin[0], i, p.head_dim, row.is_key);
            start_row<Ring::V_ROW_BYTES>(v_to, row.begin[1], i, p.head_dim_vo, row.is_key);
        }

        template <int ROW_BYTES>
        __device__ __forceinline__ void start_row(
            uint32_t to, const char* row, int i, int head_dim, bool is_key) const {
#pragma unroll
            for (int span = 0; span < ROW_BYTES; span += Ring::SPAN) {
                const bool given = is_key && span + chunk_byte < head_dim * int{sizeof(KV)};
                cp_async_16(
                    to + i * Ring::R * Ring::WARPS * ROW_BYTES + span * 8, row + chunk_byte + span,
                    given ? 16 : 0);
            }
        }
    };

    template <int WHICH, int ROW_BYTES>
    __device__ __forceinline__ void copy_elements(char* buffer, uint32_t step, int head_dim) const {
        const int lane_idx = tid_x() % WARP_SIZE;
        for (int i = 0; i < OWN_ROWS; ++i) {
            const auto& row = own.rows[step % 2][i];
            const KV* from = reinterpret_cast<const KV*>(row.begin[WHICH]);
            for (int feat = lane_idx; feat < head_dim; feat += WARP_SIZE) {
                const int byte = feat * sizeof(KV);
                char* to = buffer + swizzled<ROW_BYTES>(Ring::row(i), byte / 16) + byte % 16;
                *reinterpret_cast<KV*>(to) = row.is_key ? from[feat] : KV(0.0f);
            }
        }
    }

    // What find() and look_up() begin with: read before they need it.
    struct Known {
        typename Ring::RowPlace at;
        typename Ring::Cache cache;
        StepPlace place;
    };

    // Of what goes with step `step`.
    __device__ __forceinline__ Known know(uint32_t step) const {
        const int lane_idx = tid_x() % WARP_SIZE;
        return {
            own.places[step % 2][lane_idx % OWN_ROWS], buffers.caches[lane_idx / OWN_ROWS % 2],
            own.place[(step + 1) % 2]};
    }

    // What else goes with step `step`.
    struct LookUps {
        const SharedLoader& loader;
        uint32_t step;
        Known known;
        bool leaves = false;

        __device__ __forceinline__ LookUps(const SharedLoader& loader, uint32_t step)
            : loader(loader), step(step) {}

        // What goes behind the n-th of `num` ldmatrix of values.
        __device__ __forceinline__ void meanwhile(int n, int num) {
            if (n == num / 2) {
                known = loader.know(step);
            }
            if (n == num / 4 * 3) {
                loader.find(known, step + 2);
            }
            if (n == num / 8 * 7) {
                leaves = loader.look_up(known, step + 3);
            }
        }

        __device__ __forceinline__ void finish() const {
            if (leaves) {
                loader.leave(step + 4);
            }
        }
    };

    // Finds the rows of step `step`, whose page ids are there: half of the lanes those of keys,
    // half of values.
    __device__ __forceinline__ void find(const Known& known, uint32_t step) const {
        const int lane_idx = tid_x() % WARP_SIZE;
        const int i = lane_idx % OWN_ROWS, which = lane_idx / OWN_ROWS % 2;
        const auto& [at, cache, _] = known;
        const int64_t id = at.page.value(p.table.indices);
        const bool is_key = static_cast<uint64_t>(id) < static_cast<uint64_t>(cache.num_pages);
        const int64_t offset = id * cache.page_stride + at.entry * cache.token_stride;
        auto& row = own.rows[step % 2][i];
        row.begin[which] = cache.base + (is_key ? offset : 0);
        row.is_key = is_key;
        buffers.keys[step % 4][Ring::row(i)] = is_key;
    }

    // Starts looking up the page ids of step `step`, and says where the next one is; true: nowhere
    // in its item, so that leave() must come before it is looked up.
    __device__ __forceinline__ bool look_up(const Known& known, uint32_t step) const {
        const int lane_idx = tid_x() % WARP_SIZE;
        StepPlace place = known.place;
        const int32_t token = place.token + Ring::row(lane_idx % OWN_ROWS);
        const bool is_key = token < place.end_token;
        const uint32_t position =
            is_key && p.work.mask.given() ? p.work.mask.position(place.mask_entry, token) : token;
        const Divisor& pages = p.table.page_divisor;
        const Index& indices = p.table.indices;
        const uint32_t page_idx = pages.quotient(position);
        const int64_t i = place.first_page + static_cast<int64_t>(page_idx);
        auto& to = own.places[step % 2][lane_idx % OWN_ROWS];
        to.entry = position - page_idx * pages.divisor;
        const bool is_given = is_key && indices.given() && lane_idx < OWN_ROWS;
        if (!is_key || !indices.given()) {
            to.page = {is_key ? static_cast<int32_t>(i) : -1, is_key - 1};
        }
        copy_entry(to.page, indices, i, is_given);
        place.token += Ring::TOKENS;
        own.place[(step + 1) % 2] = place;  // by every lane the same
        return place.token >= place.end_token && place.item_idx < place.end_item;
    }

    // From the end of an item to the next one with keys, where step `step` is; behind the last
    // there are none.
    __device__ __forceinline__ void leave(uint32_t step) const {
        StepPlace place = own.place[step % 2];
        next_with_keys(p.work, place.item_idx, place.end_item, [&](const Item& item) {
            place.first_page = item.first_page;
            place.mask_entry = item.mask_entry;
            place.end_token = item.end_token;
            place.token = item.first_token;
        });
        __syncwarp();  // every lane has read it
        own.place[step % 2] = place;
    }
};

}  // namespace cukv
