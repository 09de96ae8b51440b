// Attention over latent rows: what its kernels are given, and where a tile's rows are.
//
// All query heads share one key, [ckv, kpe] of a token, and one value, its ckv. Heads fall into
// blocks, which the work list calls KV heads: the CTAs of all blocks walk side by side, so that a
// token comes from memory once. The last block may be short.
#pragma once
#include "common/kv_ring.cuh"
#include "common/queries.cuh"
#include "common/slots.cuh"

namespace cukv {

constexpr int HEAD_DIM_CKV = 512;
constexpr int HEAD_DIM_KPE = 64;
constexpr int MAX_LATENT_ITEMS = 256;  // of a tile, for the registers of a merge

struct LatentParams {
    PageTable table;     // of it the page ids: lengths are the work list's
    const char* q_nope;  // [rows, num_qo_heads, HEAD_DIM_CKV]
    const char* q_pe;    // [rows, num_qo_heads, HEAD_DIM_KPE]
    char* o;             // [rows, num_qo_heads, HEAD_DIM_CKV]
    char* lse;           // [rows, num_qo_heads] float32, base 2, or null
    WorkList work;       // its KV heads are blocks of query heads
    Scale ckv_scale;
    Scale kpe_scale;
    Pages ckv;
    Pages kpe;
    QueryRows q_nope_rows;
    QueryRows q_pe_rows;
    QueryRows o_rows;
    QueryRows lse_rows;
    Divisor group;  // by the query heads of a block
    int32_t num_qo_heads;
    float sm_scale;
    int32_t causal;
    int32_t evict_first;  // 1: latent rows leave the L2 first
};

// Starts bringing what a part begins with into the L2, its first TOKENS latent rows too, before
// earlier launches have ended. By THREADS threads.
template <typename CKV, typename KPE, int TOKENS, int THREADS>
__device__ __forceinline__ void prefetch_first_rows(
    const LatentParams& p, int part, uint32_t thread_idx = threadIdx.x) {
    constexpr int LINE = 128;  // bytes
    constexpr int CKV_LINES = HEAD_DIM_CKV * sizeof(CKV) / LINE;
    constexpr int SHARERS = THREADS > TOKENS ? THREADS / TOKENS : 1;  // threads of a row
    static_assert(HEAD_DIM_KPE * sizeof(KPE) <= LINE, "a row of kpe is a line");
    if (LAUNCHED_EARLY) {
        if (thread_idx < 2) {
            prefetch_l2((thread_idx == 0 ? p.work.part_begin : p.work.part_end) + part);
        }
        const Item item = load_item_past_l1(p.work.first_items + part);
#pragma unroll 1
        for (int i = 0; i < TOKENS; i += THREADS / SHARERS) {
            const int token = i + thread_idx / SHARERS;
            Slot slot;
            if (token < TOKENS &&
                find_early(p.table, item, int64_t{item.first_token} + token, slot) &&
                p.ckv.has(slot.page) && p.kpe.has(slot.page)) {
#pragma unroll
                for (int line = thread_idx % SHARERS; line < CKV_LINES; line += SHARERS) {
                    prefetch_l2(p.ckv.row(slot, 0) + line * LINE);
                }
                if (thread_idx % SHARERS == 0) {
                    prefetch_l2(p.kpe.row(slot, 0));
                }
            }
        }
    }
}

// A row of a tile in q, o and lse.
struct LatentRow {
    const LatentParams& p;
    const PackedRow at;
    const bool owned;  // not past the tile's rows, nor past the last head

    __device__ __forceinline__
    LatentRow(const LatentParams& p, const Item& item, int block, int row)
        : p(p),
          at(p.group, item, block, row),
          owned(row < item.num_rows && at.qo_head < p.num_qo_heads) {}

    // What sums are multiplied by to be outputs; 0 without a key.
    static __device__ __forceinline__ float factor(const LatentParams& p, float d) {
        return d > 0.0f ? p.ckv_scale.get() / d : 0.0f;
    }

    // Stores the outputs of many vectors of 2 or 4 sums: each_vector(visit) calls visit(sums,
    // feat). The usual dtypes have a loop of their own: instructions that are read once are what
    // short launches wait for. Adding 0 makes outputs of a row without keys +0.
    template <int NUM, typename EachVector>
    __device__ __forceinline__ void store(float factor, EachVector each_vector) const {
        char* to = p.o + (owned ? p.o_rows.offset(at) : 0);
        if (p.o_rows.kind <= KIND_BFLOAT16 && p.o_rows.aligned) {
            const bool is_half = p.o_rows.kind == KIND_HALF;
            each_vector([&](const float (&sums)[NUM], int feat) {
                Vec<uint32_t, NUM / 2> pairs;
#pragma unroll
                for (int i = 0; i < NUM / 2; ++i) {
                    const float low = fmaf(sums[2 * i], factor, 0.0f);
                    const float high = fmaf(sums[2 * i + 1], factor, 0.0f);
                    pairs[i] = is_half ? cvt_pair<half>(low, high) : cvt_pair<bfloat16>(low, high);
                }
                if (owned) {
                    store_vec(to + 2 * feat, pairs);
                }
            });
            return;
        }
        const int bytes = element_bytes(p.o_rows.kind);
        each_vector([&](const float (&sums)[NUM], int feat) {
            float x[NUM];
#pragma unroll
            for (int i = 0; i < NUM; ++i) {
                x[i] = fmaf(sums[i], factor, 0.0f);
            }
            if (owned) {
                store_elements(to + feat * bytes, x, p.o_rows.kind, p.o_rows.aligned);
            }
        });
    }

    __device__ __forceinline__ void store_lse(float m, float d) const {
        if (owned && p.lse != nullptr) {
            *reinterpret_cast<float*>(p.lse + p.lse_rows.offset(at)) = m + log2f(d);
        }
    }
};

// Which keys the rows of an item's tile see, beyond the limits of the item.
struct LatentSight {
    int32_t all_to;  // every row sees the tokens before this one: they need no mask

    __device__ __forceinline__ LatentSight(const LatentParams& p, const Item& item)
        : all_to(p.causal ? position(p, item, 0) + 1 : 0x7fffffff) {}

    // Of the query of a row.
    static __device__ __forceinline__ int32_t
    position(const LatentParams& p, const Item& item, int row) {
        return item.diagonal + static_cast<int32_t>(p.group.quotient(item.first_row + row));
    }

    // The last token that a row sees.
    static __device__ __forceinline__ int32_t
    last(const LatentParams& p, const Item& item, int row) {
        return p.causal ? position(p, item, row) : 0x7fffffff;
    }
};

}  // namespace cukv
