// Latent rows of a part, step by step through a ring of buffers, and who copies them.
//
// A step is TOKENS keys, a buffer of them [ckv rows][kpe rows], both swizzled. Every warp copies
// its own 8 rows of each step: a lane pieces of two of them, 128 bytes apart, so that it has two
// addresses of each part and all else is known when compiling.
#pragma once
#include "common/kv_ring.cuh"
#include "common/latent.cuh"

namespace cukv {

// Geometry of a ring. A row of kpe takes 128 bytes, or a half of them in fp8.
template <typename CKV_, typename KPE_, int WARPS_, int STAGES_>
struct LatentRing {
    using CKV = CKV_;
    using KPE = KPE_;
    static constexpr int WARPS = WARPS_, STAGES = STAGES_;
    static constexpr int OWN_TOKENS = 8, TOKENS = WARPS * OWN_TOKENS;
    static constexpr int CKV_ROW_BYTES = HEAD_DIM_CKV * sizeof(CKV), KPE_ROW_BYTES = 128;
    // From a line of 128 bytes of a row of ckv to the next, and from 8 rows to the next 8.
    static constexpr int LINE_STRIDE = 1024, GROUP_STRIDE = 8 * CKV_ROW_BYTES;

    struct Buffer {
        char ckv[TOKENS * CKV_ROW_BYTES];
        char kpe[TOKENS * KPE_ROW_BYTES];
    };
    using Buffers = Buffer[STAGES];
    using Keys = uint8_t[STAGES][WARPS];  // of a warp's rows of a buffer: bit r, whether r is a key
};

// Fills a warp's share of a ring.
template <typename Ring, bool ALIGNED>
struct LatentLoader {
    using CKV = typename Ring::CKV;
    using KPE = typename Ring::KPE;
    using Buffer = typename Ring::Buffer;
    using Walk = StepWalk<Ring::TOKENS, Ring::WARPS, Ring::WARPS, false>;
    static_assert(Walk::OWN_TOKENS == Ring::OWN_TOKENS, "a warp copies as many keys as it scores");

    const LatentParams& p;
    typename Ring::Buffers& buffers;
    typename Ring::Keys& keys;
    const uint64_t policy;
    Walk walk;

    __device__ __forceinline__ LatentLoader(
        const LatentParams& p,
        typename Ring::Buffers& buffers,
        typename Ring::Keys& keys,
        const Item& first,
        int32_t first_item,
        int32_t end_item)
        : p(p),
          buffers(buffers),
          keys(keys),
          policy(p.evict_first ? createpolicy_evict_first() : createpolicy_evict_unchanged()),
          walk(p.table, p.work, first, first_item, end_item) {}

    // Starts the copies of the next step into a buffer, as one group, which is empty past the last
    // step: whoever waits counts groups.
    __device__ __forceinline__ void issue(int stage) {
        __syncwarp();  // the buffer has been read
        if (!walk.done()) {
            const int64_t id = walk.page.value(p.table.indices);
            // kpe has as many pages.
            const bool has_key = walk.own_token() < walk.end_token && p.ckv.has(id);
            const uint32_t votes = __ballot_sync(0xffffffffu, has_key);
            // Both fit into 32 bits, of which the compiler does not know.
            const Slot slot = {
                has_key ? static_cast<uint32_t>(id) : 0,
                has_key ? static_cast<uint32_t>(walk.entry()) : 0};
            // Of the row that is this lane's by its number, modulo 8.
            const int64_t ckv = reinterpret_cast<int64_t>(p.ckv.row(slot, 0));
            const int64_t kpe = reinterpret_cast<int64_t>(p.kpe.row(slot, 0));
            const int warp_idx = threadIdx.x / WARP_SIZE;
            if (threadIdx.x % WARP_SIZE == 0) {
                keys[stage][warp_idx] = votes;
            }
            Buffer& buffer = buffers[stage];
            copy<CKV, HEAD_DIM_CKV, Ring::CKV_ROW_BYTES>(
                buffer.ckv + warp_idx * Ring::OWN_TOKENS * Ring::CKV_ROW_BYTES, ckv, votes);
            copy<KPE, HEAD_DIM_KPE, Ring::KPE_ROW_BYTES>(
                buffer.kpe + warp_idx * Ring::OWN_TOKENS * Ring::KPE_ROW_BYTES, kpe, votes);
            walk.next();
        }
        cp_async_commit_group();
    }

    // Rows that are not keys become zeros, and are not read.
    template <typename DType, int DIM, int ROW_BYTES>
    __device__ __forceinline__ void copy(char* rows, int64_t own_row, uint32_t votes) const {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        if constexpr (ALIGNED) {
            constexpr int BYTES = DIM * sizeof(DType), LINE = 128;
            const int chunk = lane_idx % 8;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = lane_idx / 8 + 4 * i;
                const int64_t from = __shfl_sync(0xffffffffu, own_row, row) + chunk * 16;
                const int src_bytes = (votes >> row & 1) * 16;
                const uint32_t to = smem_address(rows) + swizzled<ROW_BYTES>(row, chunk);
#pragma unroll
                for (int line = 0; line < ROW_BYTES / LINE; ++line) {
                    if (BYTES >= LINE || chunk * 16 < BYTES) {
                        cp_async_16(
                            to + line * 1024, reinterpret_cast<const char*>(from) + line * LINE,
                            src_bytes, policy);
                    }
                }
            }
        } else {
            for (int row = 0; row < Ring::OWN_TOKENS; ++row) {
                const auto* from =
                    reinterpret_cast<const DType*>(__shfl_sync(0xffffffffu, own_row, row));
                for (int feat = lane_idx; feat < DIM; feat += WARP_SIZE) {
                    const int byte = feat * sizeof(DType);
                    char* to = rows + swizzled<ROW_BYTES>(row, byte / 16) + byte % 16;
                    *reinterpret_cast<DType*>(to) = votes >> row & 1 ? from[feat] : DType(0.0f);
                }
            }
        }
    }
};

}  // namespace cukv
