// mla_decode -- attend from a few packed query rows to paged latent rows, item by item of a work
// list.
//
//   s[r, j] = sm_scale * (q_nope[r] . ckv[j] + q_pe[r] . kpe[j]), for the keys j that row r sees
//   o[r] = sum_j softmax(s[r])[j] * ckv[j],  lse[r] = log2(sum_j 2^(s[r, j] * log2(e)))
//
// The query heads of a block, times the query rows of a request, are the rows of a tile of 16. A
// CTA owns one block and one part of the work list; its warps copy a step of TOKENS keys together,
// some steps ahead. Of a step each warp scores 8 keys, and then, with the weights of all keys, adds
// up its share of the features. Bound by HBM: the latent rows, once.
// Host: cukv/mla.py MLAPagedCache.decode       Reference: cukv/reference.py mla_decode
#include "common/kv_ring.cuh"
#include "common/latent.cuh"
#include "common/latent_queries.cuh"
#include "common/logits.cuh"

namespace cukv {

using MlaDecodeParams = LatentParams;

static_assert(
    sizeof(MlaDecodeParams) == PARAMS_BYTES, "host and device disagree on the parameters");

// Where the rows begin that a warp copies next.
template <int TOKENS>
struct LatentRowStarts {
    const char* ckv[TOKENS];
    const char* kpe[TOKENS];
};

// Geometry of one specialisation, and its shared memory.
template <typename CKV, typename KPE, int WARPS, int STAGES, int HELD>
struct MlaDecodeCta {
    static constexpr int THREADS = WARPS * WARP_SIZE;
    static constexpr int ROWS = 16, TOKENS = WARPS * 8, WARP_FEATS = HEAD_DIM_CKV / WARPS;
    static constexpr int CKV_ROW_BYTES = HEAD_DIM_CKV * sizeof(CKV);
    static constexpr int KPE_ROW_BYTES = 128;  // all of them, or a half in fp8
    static constexpr int WEIGHT_ROW_BYTES = 128;

    // Sums of more than 64 features leave no registers for all queries.
    static constexpr int NOPE_STEPS = HEAD_DIM_CKV / 16, PE_STEPS = HEAD_DIM_KPE / 16;
    using NopeQueries = HeldQueries<CKV, NOPE_STEPS, HELD>;
    using PeQueries = HeldQueries<KPE, PE_STEPS, HELD == NOPE_STEPS ? PE_STEPS : 0>;

    using Walk = StepWalk<TOKENS, WARPS, WARPS>;
    static_assert(Walk::OWN_TOKENS == 8, "a warp copies as many keys as it scores");
    static_assert(2 * TOKENS <= WEIGHT_ROW_BYTES, "a row of weights is of the keys of a step");

    struct Buffer {
        char ckv[TOKENS * CKV_ROW_BYTES];
        char kpe[TOKENS * KPE_ROW_BYTES];
    };

    struct Smem {
        alignas(1024) Buffer ring[STAGES];
        char weights[ROWS * WEIGHT_ROW_BYTES];
        typename NopeQueries::Rest nope_rest;
        typename PeQueries::Rest pe_rest;
        float maxima[ROWS][WARPS];    // of each warp's keys; at the end of an item, denominators
        uint8_t keys[STAGES][WARPS];  // of a warp's rows of a buffer: which are keys
        LatentRowStarts<Walk::OWN_TOKENS> rows[WARPS];
        typename LatentQueryTile<CKV, KPE>::Scales scales;
        Item item;
        Gate gates[2];  // of the tiles that other CTAs work on too
    };
    using Queries = LatentQueryTile<CKV, KPE>;
    static_assert(sizeof(Queries) <= sizeof(Buffer), "queries come by way of a buffer");
    static_assert(
        sizeof(Buffer) >= sizeof(float) * (ROWS + 2 * MAX_LATENT_ITEMS),
        "weights of a merge fit into the ring");
};

// Fills the ring. Every warp copies its own tokens of each step.
template <typename Cta, typename CKV, typename KPE, bool ALIGNED>
struct LatentLoader {
    static constexpr int OWN = Cta::Walk::OWN_TOKENS;

    const LatentParams& p;
    typename Cta::Smem& smem;
    typename Cta::Walk walk;

    __device__ __forceinline__ LatentLoader(
        const LatentParams& p,
        typename Cta::Smem& smem,
        const Item& first,
        int32_t first_item,
        int32_t end_item)
        : p(p), smem(smem), walk(p.table, p.work, first, first_item, end_item) {}

    // Starts the copies of the next step into a buffer, as one group, which is empty past the last
    // step: whoever waits counts groups.
    __device__ __forceinline__ void issue(int stage) {
        __syncwarp();  // the buffer, and the rows of the step before, have been read
        if (!walk.done()) {
            const uint32_t votes = find_rows(stage);
            if (ALIGNED && votes == 0xffffffffu) {
                copy<true>(stage, votes);
            } else {
                copy<false>(stage, votes);
            }
            walk.next();
        }
        cp_async_commit_group();
    }

    // Says where the next step's rows are, and which of them are keys: bit r, whether row r is.
    __device__ __forceinline__ uint32_t find_rows(int stage) {
        const int warp_idx = threadIdx.x / WARP_SIZE, lane_idx = threadIdx.x % WARP_SIZE;
        const int64_t id = walk.page.value(p.table.indices);
        const bool has_key = walk.own_token() < walk.end_token && p.ckv.has(id) && p.kpe.has(id);
        const uint32_t votes = __ballot_sync(0xffffffffu, has_key);
        if (lane_idx < OWN) {
            const Slot slot = {has_key ? id : 0, has_key ? walk.entry() : 0};
            smem.rows[warp_idx].ckv[lane_idx] = p.ckv.row(slot, 0);
            smem.rows[warp_idx].kpe[lane_idx] = p.kpe.row(slot, 0);
        }
        if (lane_idx == 0) {
            smem.keys[stage][warp_idx] = votes;
        }
        __syncwarp();  // the rows are there
        return votes;
    }

    template <bool ALL>
    __device__ __forceinline__ void copy(int stage, uint32_t votes) {
        const auto& rows = smem.rows[threadIdx.x / WARP_SIZE];
        char* ckv = smem.ring[stage].ckv + Cta::Walk::own_row() * Cta::CKV_ROW_BYTES;
        char* kpe = smem.ring[stage].kpe + Cta::Walk::own_row() * Cta::KPE_ROW_BYTES;
        if constexpr (ALIGNED) {
            copy_rows<Cta::CKV_ROW_BYTES, ALL>(
                ckv, rows.ckv, HEAD_DIM_CKV * int{sizeof(CKV)}, votes);
            copy_rows<Cta::KPE_ROW_BYTES, ALL>(
                kpe, rows.kpe, HEAD_DIM_KPE * int{sizeof(KPE)}, votes);
        } else if constexpr (!ALL) {
            copy_elements<CKV, Cta::CKV_ROW_BYTES>(ckv, rows.ckv, HEAD_DIM_CKV, votes);
            copy_elements<KPE, Cta::KPE_ROW_BYTES>(kpe, rows.kpe, HEAD_DIM_KPE, votes);
        }
    }
};

// s = q k^T for the 8 keys at `keys`. Products that all add to one sum would wait for each other:
// there are CHAINS sums.
template <int ROW_BYTES, int CHAINS, typename KV, int K_STEPS, int HELD>
__device__ __forceinline__ void multiply_latent_keys(
    float (&s)[4], const HeldQueries<KV, K_STEPS, HELD>& queries, uint32_t keys) {
    using Chunks = KeyChunks<KV>;
    float part[CHAINS][4] = {};
#pragma unroll
    for (int i = 0; i < K_STEPS / Chunks::K_STEPS; ++i) {
        if (is_fp8<KV> && i % 2 == 0) {
            __syncwarp();  // keeps the compiler from loading all chunks first, and spilling
        }
        Chunks b;
        b.template load<ROW_BYTES>(keys, i);
#pragma unroll
        for (int j = 0; j < Chunks::K_STEPS; ++j) {
            const int k_step = i * Chunks::K_STEPS + j;
            const OperandPair pair = b[j];
            uint32_t a[4];
            queries.get(a, k_step);
            mma_m16n8k16<Operand<KV>>(part[k_step % CHAINS], a, pair.b0, pair.b1);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        s[i] = part[0][i];
#pragma unroll
        for (int chain = 1; chain < CHAINS; ++chain) {
            s[i] += part[chain][i];
        }
    }
}

template <typename CKV, typename KPE, int WARPS, int STAGES, int HELD, int MIN_CTAS, bool ALIGNED>
__global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)
    mla_decode(const __grid_constant__ MlaDecodeParams p) {
    using Cta = MlaDecodeCta<CKV, KPE, WARPS, STAGES, HELD>;
    constexpr int ROWS = Cta::ROWS, TOKENS = Cta::TOKENS, FEATS = Cta::WARP_FEATS;
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<typename Cta::Smem*>(smem_bytes);
    const int warp_idx = threadIdx.x / WARP_SIZE, lane_idx = threadIdx.x % WARP_SIZE;

    // 1 the CTA's part, and its first keys on their way
    const int block = blockIdx.x % p.work.num_kv_heads;
    const int part = blockIdx.x / p.work.num_kv_heads;
    griddepcontrol_wait();
    const Item first = load_item(p.work.first_items + part);
    const int32_t first_item = p.work.part_begin[part], end_item = p.work.part_end[part];
    if (first_item >= end_item) {
        return;
    }
    LatentLoader<Cta, CKV, KPE, ALIGNED> loader(p, smem, first, first_item, end_item);
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        loader.issue(stage);
    }

    const int row = lane_row(0, 0);  // of a tile, and row + 8
    const Item& item = smem.item;
    if (threadIdx.x == 0) {
        smem.item = first;
    }
    int stage = 0;
    bool postponed = false;  // whether the copies that go with the last step have not begun
#pragma unroll 1
    for (int32_t item_idx = first_item; item_idx < end_item; ++item_idx) {
        // 2 queries, by way of the buffer that is filled next
        if (threadIdx.x == 0 && item_idx > first_item) {
            smem.item = load_item(p.work.items + item_idx);
        }
        __syncthreads();  // the item is there
        typename Cta::PeQueries q_pe(smem.pe_rest);
        typename Cta::NopeQueries q_nope(smem.nope_rest);
        if (item.first_token < item.end_token) {
            const int free = (stage + STAGES - (postponed ? 2 : 1)) % STAGES;
            auto& queries = *reinterpret_cast<typename Cta::Queries*>(&smem.ring[free]);
            queries.template load<WARPS>(p, item, block, smem.scales);
            __syncthreads();  // queries are there
            q_pe.load(queries.pe, smem.pe_rest, warp_idx == 0);
            q_nope.load(queries.nope, smem.nope_rest, warp_idx == 0);
            if (postponed) {
                __syncthreads();  // queries have been read
                loader.issue(free);
            }
            postponed = true;
        }

        // 3 steps
        const LatentSight sight(p, item);
        LatentState<FEATS / 8> warp;
        float s[1][1][4];
        const int own = warp_idx * 8;  // first of the warp's own keys
        const int32_t end_token = item.end_token;
#pragma unroll 1
        for (int32_t token = item.first_token; token < end_token; token += TOKENS) {
            cp_async_wait_group<STAGES - 2>();
            __syncthreads();  // all copies have landed, and the buffer before has been read
            if (token + TOKENS < end_token) {
                loader.issue((stage + STAGES - 1) % STAGES);
            }

            // Logits of the warp's own keys.
            const auto& buffer = smem.ring[stage];
            float s_pe[4];
            multiply_latent_keys<Cta::CKV_ROW_BYTES, 4>(
                s[0][0], q_nope, smem_address(buffer.ckv) + own * Cta::CKV_ROW_BYTES);
            multiply_latent_keys<Cta::KPE_ROW_BYTES, 1>(
                s_pe, q_pe, smem_address(buffer.kpe) + own * Cta::KPE_ROW_BYTES);
            each_score(s, [&](float& x, int, int half_idx, int, int column) {
                const float2 scales = smem.scales[row + half_idx * 8];
                x = fmaf(x, scales.x, s_pe[half_idx * 2 + column % 2] * scales.y);
            });
            const uint32_t keys = smem.keys[stage][warp_idx];
            const int32_t first = token + own;
            if (keys != 0xff || first + 8 > sight.all_to) {
                each_score(s, [&](float& x, int, int half_idx, int, int local) {
                    const int own_row = row + half_idx * 8;
                    const bool seen =
                        (keys >> local & 1) && LatentSight::sees(p, item, own_row, first + local);
                    x = seen ? x : NO_KEY;
                });
            }

            // The rows' maxima over all keys of the step.
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float m = row_maximum(s[0][0], i);
                if (lane_idx % 4 == 0) {
                    smem.maxima[row + i * 8][warp_idx] = m;
                }
            }
            __syncthreads();  // maxima are there
            float maxima[2] = {NO_KEY, NO_KEY};
#pragma unroll
            for (int i = 0; i < 2 * WARPS; ++i) {
                maxima[i % 2] = fmaxf(maxima[i % 2], smem.maxima[row + i % 2 * 8][i / 2]);
            }
            warp.weigh(s[0][0], maxima);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                char* to = smem.weights + swizzled<Cta::WEIGHT_ROW_BYTES>(row + i * 8, warp_idx);
                *reinterpret_cast<uint32_t*>(to + lane_idx % 4 * 4) =
                    cvt_pair<Operand<CKV>>(s[0][0][2 * i], s[0][0][2 * i + 1]);
            }
            __syncthreads();  // weights are there

            // Weights of all keys of the step, times their values.
            multiply_latent_values<CKV, Cta::CKV_ROW_BYTES, TOKENS>(
                warp.o[0], smem_address(smem.weights), smem_address(buffer.ckv),
                warp_idx * FEATS / 8);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        if (item_idx + 1 == end_item) {
            griddepcontrol_launch_dependents();
        }

        // 4 the result, or a slot's state if the tile has other items
        float d[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float own_d = warp.whole_d(0, i);
            if (lane_idx % 4 == 0) {
                smem.maxima[row + i * 8][warp_idx] = own_d;
            }
        }
        __syncthreads();  // denominators are there
        const bool whole = item.first_slot < 0;
        const Slots<ROWS, HEAD_DIM_CKV> slots{p.work, item, block};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            d[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < WARPS; ++j) {
                d[i] += smem.maxima[row + i * 8][j];
            }
            if (warp_idx == 0 && lane_idx % 4 == 0 && !whole) {
                slots.store_state(warp.m[0][i], d[i], row + i * 8);
            }
            const auto each_vector = [&](auto visit) {
                warp.template each_vector<CKV>(0, i, [&](const float (&sums)[4], int feat) {
                    visit(sums, warp_idx * FEATS + feat);
                });
            };
            if (whole) {
                const LatentRow to(p, item, block, row + i * 8);
                to.store(LatentRow::factor(p, d[i]), each_vector);
                if (warp_idx == 0 && lane_idx % 4 == 0) {
                    to.store_lse(warp.m[0][i], d[i]);
                }
            } else {
                each_vector([&](const float (&sums)[4], int feat) {
                    slots.store_sums(sums, row + i * 8, feat);
                });
            }
        }
        __syncthreads();  // the slot is written, the item and the denominators have been read
        if (threadIdx.x == 0) {
            smem.gates[item_idx > first_item].arrive(p.work, item, block);
        }
    }

    // 5 shares of the tiles that other CTAs work on too: only the first and the last item's
    const int num_gates = min(end_item - first_item, 2);
#pragma unroll 1
    for (int i = 0; i < num_gates; ++i) {
        auto& gate = smem.gates[i];
        if (threadIdx.x == 0) {
            gate.wait(p.work, block);
        }
        __syncthreads();  // the slots are there
        const auto sync = [] { __syncthreads(); };
        float* weights = reinterpret_cast<float*>(smem.ring);
        LatentMerge<ROWS, Cta::THREADS, decltype(sync)>{
            p, gate.item, block, static_cast<int>(threadIdx.x), weights, sync}
            .merge(gate.shares);
    }
}

}  // namespace cukv
