// Latent rows of a part brought step by step into a ring of buffers by tensor maps, on Hopper.
//
// A warp has them copied that does nothing else: of a piece, the tokens of a step that lie in one
// page, one copy brings a line of 128 bytes of each row. Copies begin as soon as the warps that
// compute have read a buffer, and go on into the next items.
#pragma once
#include "common/latent_maps.cuh"
#include "common/operand_tiles.cuh"

namespace cukv {

// A ring, and what its warps and who has it filled tell each other. Lines are swizzled.
template <typename CKV_, typename KPE_, int WARPS_, int STAGES_>
struct LatentBoxes {
    using CKV = CKV_;
    using KPE = KPE_;
    static constexpr int WARPS = WARPS_, STAGES = STAGES_;
    static constexpr int OWN_TOKENS = 8, TOKENS = WARPS * OWN_TOKENS;
    static constexpr int LINE = 128, CKV_LINES = HEAD_DIM_CKV * sizeof(CKV) / LINE;
    static constexpr int LINE_STRIDE = TOKENS * LINE, GROUP_STRIDE = OWN_TOKENS * LINE;

    struct Buffer {
        char ckv[CKV_LINES][TOKENS * LINE];
        char kpe[TOKENS * LINE];
    };

    Buffer buffers[STAGES];
    uint64_t full[STAGES], empty[STAGES];  // barriers
    uint8_t keys[STAGES][WARPS];  // of a warp's rows of a buffer: bit r, whether r is a key

    // By one thread.
    __device__ __forceinline__ void init() {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full[stage], 1);
            mbarrier_init(empty[stage], WARPS);
        }
        fence_mbarrier_init();
    }

    // Waits for a step of so many keys, by a warp that will score its own rows of it. Rows past the
    // keys came with others and become zeros: whatever they hold, their weights are 0.
    __device__ __forceinline__ void wait(const RingPlace<STAGES>& at, int32_t num_keys) {
        mbarrier_try_wait(full[at.stage], at.parity);
        if (num_keys >= TOKENS) {
            return;
        }
        char* buffer = buffers[at.stage].ckv[0];
        const int own_row = threadIdx.x / WARP_SIZE * OWN_TOKENS,
                  lane_idx = threadIdx.x % WARP_SIZE;
#pragma unroll 1
        for (int row = max(own_row, num_keys); row < own_row + OWN_TOKENS; ++row) {
            for (int i = lane_idx; i < sizeof(Buffer) / TOKENS / 16; i += WARP_SIZE) {
                char* to = buffer + i / 8 * (TOKENS * LINE) + row * LINE + i % 8 * 16;
                *reinterpret_cast<uint4*>(to) = uint4{};
            }
        }
        fence_proxy_async();  // copies into the buffer come behind
        __syncwarp();
    }

    // This warp has read a buffer. Copies into it need no fence: nobody wrote there but `wait`.
    __device__ __forceinline__ void release(int stage) {
        __syncwarp();
        if (threadIdx.x % WARP_SIZE == 0) {
            mbarrier_arrive(empty[stage]);
        }
    }
};

// The warp that has a ring filled. A lane has a piece copied.
template <typename Boxes>
struct LatentBoxServer {
    static constexpr int TOKENS = Boxes::TOKENS, OWN_TOKENS = Boxes::OWN_TOKENS;

    const LatentMappedParams& p;
    Boxes& boxes;
    const int lane_idx = threadIdx.x % WARP_SIZE;
    const int row;  // of a step, that the lane's piece begins with; none if not below TOKENS
    const uint64_t policy;

    __device__ __forceinline__ LatentBoxServer(const LatentMappedParams& p, Boxes& boxes)
        : p(p),
          boxes(boxes),
          row(lane_idx << p.piece_bits),
          policy(p.evict_first ? createpolicy_evict_first() : createpolicy_evict_unchanged()) {}

    __device__ __forceinline__ void run(int part) {
        Item item = load_item(p.work.first_items + part);
        int32_t item_idx = p.work.part_begin[part];
        const int32_t end_item = p.work.part_end[part];
        RingPlace<Boxes::STAGES> at;
        while (item_idx < end_item) {
            IndexEntry page{};
            if (item.first_token < item.end_token) {  // else there may be no page to look up
                page = look_up(item, item.first_token);
            }
            for (int32_t token = item.first_token; token < item.end_token; token += TOKENS) {
                const int64_t id = page.value(p.table.indices);
                page = look_up(item, token + TOKENS);
                fill(at, token, item.end_token, id);
                at.next();
            }
            if (++item_idx < end_item) {
                item = load_item(p.work.items + item_idx);
            }
        }
    }

    // Starts to load the id of the page of the lane's piece; past the end, the request's first.
    __device__ __forceinline__ IndexEntry look_up(const Item& item, int32_t token) const {
        const bool is_past = row >= TOKENS || token + row >= item.end_token;
        const int32_t page_idx = p.table.page_divisor.quotient(token + row);
        return p.table.indices.entry(item.first_page + (is_past ? 0 : page_idx));
    }

    // Has the step of keys [token, end_token) copied once its buffer is free. What lies outside of
    // the array comes as zeros, and so do pages that are not there.
    __device__ __forceinline__ void fill(
        const RingPlace<Boxes::STAGES>& at, int32_t token, int32_t end_token, int64_t id) {
        // kpe has as many pages.
        const bool has = row < TOKENS && token + row < end_token && p.ckv.has(id);
        const uint32_t votes = __ballot_sync(0xffffffffu, has);
        const int page = has ? static_cast<int>(id) : static_cast<int>(p.ckv.max_num_pages);
        const int32_t page_idx = p.table.page_divisor.quotient(token + row);
        const int entry = token + row - page_idx * p.table.page_divisor.divisor;
        auto& full = boxes.full[at.stage];
        auto& buffer = boxes.buffers[at.stage];
        mbarrier_try_wait(boxes.empty[at.stage], at.parity ^ 1);
        if (lane_idx < Boxes::WARPS) {  // of the warp's rows
            const int num = min(end_token - token - lane_idx * OWN_TOKENS, OWN_TOKENS);
            const bool is_there = votes >> (lane_idx * OWN_TOKENS >> p.piece_bits) & 1;
            boxes.keys[at.stage][lane_idx] = is_there && num > 0 ? 0xff >> (OWN_TOKENS - num) : 0;
        }
        __syncwarp();  // who waits for the copies finds the keys
        if (lane_idx == 0) {
            mbarrier_arrive_expect_tx(full, sizeof(buffer));
        }
        __syncwarp();
        if (row < TOKENS) {
#pragma unroll
            for (int line = 0; line < Boxes::CKV_LINES; ++line) {
                cp_async_bulk_tensor_4d(
                    smem_address(buffer.ckv[line] + row * Boxes::LINE), p.ckv_map, full, 0, entry,
                    line, page, policy);
            }
            cp_async_bulk_tensor_4d(
                smem_address(buffer.kpe + row * Boxes::LINE), p.kpe_map, full, 0, entry, 0, page,
                policy);
        }
    }
};

}  // namespace cukv
