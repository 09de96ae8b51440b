// mla_decode -- attend from a few packed query rows to paged latent rows, item by item of a work
// list.
//
//   s[r, j] = sm_scale * (q_nope[r] . ckv[j] + q_pe[r] . kpe[j]), for the keys j that row r sees
//   o[r] = sum_j softmax(s[r])[j] * ckv[j],  lse[r] = log2(sum_j 2^(s[r, j] * log2(e)))
//
// The query heads of a block, times the query rows of a request, are the rows of a tile of 16. A
// CTA owns one block and one part of the work list; its warps copy a step of TOKENS keys together,
// some steps ahead. Of a step each warp weighs 8 keys, and then, with the weights of all keys, adds
// up its share of the features. Weights are relative to maxima of earlier steps, so that nothing
// but weights goes between warps while these maxima are high enough. Bound by HBM: the latent rows,
// once.
// Host: cukv/mla.py MLAPagedCache.decode       Reference: cukv/reference.py mla_decode
#include "common/latent_merge.cuh"
#include "common/latent_queries.cuh"
#include "common/latent_ring.cuh"
#include "common/logits.cuh"

namespace cukv {

using MlaDecodeParams = LatentParams;

static_assert(
    sizeof(MlaDecodeParams) == PARAMS_BYTES, "host and device disagree on the parameters");

// Geometry of one specialisation, and its shared memory.
template <typename CKV, typename KPE, int WARPS, int STAGES, int HELD>
struct MlaDecodeCta {
    static constexpr int THREADS = WARPS * WARP_SIZE;
    static constexpr int ROWS = 16, WARP_FEATS = HEAD_DIM_CKV / WARPS;
    static constexpr int WEIGHT_ROW_BYTES = 128;

    using Ring = LatentRing<CKV, KPE, WARPS, STAGES>;
    static_assert(2 * Ring::TOKENS <= WEIGHT_ROW_BYTES, "a row of weights is of a step's keys");

    // Whether the next step's scores are worked out beside a step's values, so that warps wait for
    // each other once a step, not twice. It takes a buffer that else were on its way.
    static constexpr bool AHEAD = STAGES > 3;

    // Sums of more than 64 features leave no registers for all queries.
    using Queries = LatentQueryTile<CKV, KPE>;
    using NopeQueries = HeldQueries<CKV, Queries::NOPE_STEPS, HELD>;
    static constexpr int HELD_PE = HELD == Queries::NOPE_STEPS ? Queries::PE_STEPS : 0;
    using PeQueries = HeldQueries<KPE, Queries::PE_STEPS, HELD_PE>;
    static_assert(sizeof(Queries) <= sizeof(typename Ring::Buffer), "they come by way of a buffer");

    struct Smem {
        alignas(1024) typename Ring::Buffers ring;
        char weights[2][ROWS * WEIGHT_ROW_BYTES];  // of steps in turn
        typename NopeQueries::Rest nope_rest;
        typename PeQueries::Rest pe_rest;
        float maxima[ROWS][WARPS];  // of each warp's keys; at the end of an item, denominators
        typename Ring::Keys keys;
        typename Queries::Scales scales;
        Item item;
        int32_t first_item;  // of the part
        bool postponed;      // whether the copies that go with the last step have not begun
        Gate gates[2];       // of the tiles that other CTAs work on too
    };
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

template <int NUM>
__device__ __forceinline__ float largest_of(const float (&x)[NUM]) {
    float largest[NUM];
#pragma unroll
    for (int i = 0; i < NUM; ++i) {
        largest[i] = x[i];
    }
#pragma unroll
    for (int n = NUM / 2; n > 0; n /= 2) {
#pragma unroll
        for (int i = 0; i < n; ++i) {
            largest[i] = fmaxf(largest[i], largest[i + n]);
        }
    }
    return largest[0];
}

template <typename CKV, typename KPE, int WARPS, int STAGES, int HELD, int MIN_CTAS, bool ALIGNED>
__global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)
    mla_decode(const __grid_constant__ MlaDecodeParams p) {
    using Cta = MlaDecodeCta<CKV, KPE, WARPS, STAGES, HELD>;
    using Ring = typename Cta::Ring;
    constexpr int ROWS = Cta::ROWS, TOKENS = Ring::TOKENS, FEATS = Cta::WARP_FEATS;
    using TileSlots = LatentSlots<CKV, ROWS, FEATS>;
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<typename Cta::Smem*>(smem_bytes);
    const int warp_idx = threadIdx.x / WARP_SIZE, lane_idx = threadIdx.x % WARP_SIZE;

    // 1 the CTA's part, and its first queries and keys on their way, of which keys come into the L2
    //   even before earlier launches have ended
    const int block = blockIdx.x % p.work.num_kv_heads;
    const int part = blockIdx.x / p.work.num_kv_heads;
    // As many as are on their way at a time.
    prefetch_first_rows<CKV, KPE, (STAGES - 1) * TOKENS, Cta::THREADS>(p, part);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    Item first = load_item(p.work.first_items + part);
    const int32_t first_item = p.work.part_begin[part], end_item = p.work.part_end[part];
    if (first_item >= end_item) {
        // Not a return yet: the compiler would look up the item behind it.
        first.num_rows = first.first_token = first.end_token = 0;
    }
    LatentLoader<Ring, ALIGNED> loader(p, smem.ring, smem.keys, first, first_item, end_item);
    // Queries before keys: what is asked for behind copies comes behind them, which takes long.
    typename Cta::Queries::template Loader<WARPS> on_way;
    on_way.load(p, first, block);
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        loader.issue(stage);
    }
    if (first_item >= end_item) {
        return;
    }

    const int row = lane_row(0, 0);  // of a tile, and row + 8
    const Item& item = smem.item;
    if (threadIdx.x == 0) {
        smem.item = first;
        smem.first_item = first_item;
        smem.postponed = false;
    }
    int stage = 0;
#pragma unroll 1
    for (int32_t item_idx = first_item;;) {
        // 2 queries, by way of the buffer that is filled next
        __syncthreads();  // the item is there
        typename Cta::PeQueries q_pe(smem.pe_rest);
        typename Cta::NopeQueries q_nope(smem.nope_rest);
        if (item.first_token < item.end_token) {
            const bool postponed = smem.postponed;
            const int free = (stage + STAGES - (postponed ? 2 : 1)) % STAGES;
            auto& queries = *reinterpret_cast<typename Cta::Queries*>(&smem.ring[free]);
            on_way.store(queries, p, smem.scales);
            __syncthreads();  // queries are there
            q_pe.load(queries.pe, smem.pe_rest, warp_idx == 0);
            q_nope.load(queries.nope, smem.nope_rest, warp_idx == 0);
            if (postponed) {
                __syncthreads();  // queries have been read
                loader.issue(free);
            }
            if (threadIdx.x == 0) {
                smem.postponed = true;  // all have read it before the queries were there
            }
        }

        // 3 steps: of one the weights, and then its values and the weights of the next
        const LatentSight sight(p, item);
        LatentState<FEATS / 8> warp;
        float s[1][1][4], weights[4];
        bool rises = false;
        int turn = 0;  // of a step's weights
        const auto put_weights = [&] {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                char* to =
                    smem.weights[turn] + swizzled<Cta::WEIGHT_ROW_BYTES>(row + i * 8, warp_idx);
                *reinterpret_cast<uint32_t*>(to + lane_idx % 4 * 4) =
                    cvt_pair<Operand<CKV>>(weights[2 * i], weights[2 * i + 1]);
            }
        };
        const int own = warp_idx * 8;  // first of the warp's own keys
        const int32_t first_token = item.first_token, end_token = item.end_token;
#pragma unroll 1
        for (int32_t token = first_token - TOKENS; token < end_token; token += TOKENS) {
            const bool scored = token >= first_token, more = token + TOKENS < end_token;
            if constexpr (Cta::AHEAD) {
                if (more && scored) {
                    cp_async_wait_group<STAGES - 3>();
                } else if (more) {
                    cp_async_wait_group<STAGES - 2>();
                }
            }
            if (Cta::AHEAD || scored) {
                // Weights are there, and, if ahead, the next step's keys; the buffer before has
                // been read.
                rises = __syncthreads_or(rises);
            }
            // What copies wait for before they begin takes long, so half of the warps begin theirs
            // while the others multiply.
            const auto issue_by_half = [&](bool second, bool is_needed) {
                if (is_needed && (warp_idx >= WARPS / 2) == second) {
                    loader.issue(stage == 0 ? STAGES - 1 : stage - 1);
                }
            };
            if (scored) {
                issue_by_half(false, Cta::AHEAD && more);
                if (rises) {  // seldom, but for an item's first step
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float m = row_maximum(s[0][0], i);
                        if (lane_idx % 4 == 0) {
                            smem.maxima[row + i * 8][warp_idx] = m;
                        }
                    }
                    __syncthreads();  // maxima are there
                    warp.raise({largest_of(smem.maxima[row]), largest_of(smem.maxima[row + 8])});
                    warp.weigh(weights, s[0][0]);
                    put_weights();
                    __syncthreads();  // weights are there again
                }

                // Weights of all keys of the step, times their values.
                warp.add_weights(weights);
                multiply_latent_values<CKV, Ring::CKV_ROW_BYTES, TOKENS>(
                    warp.o[0], smem_address(smem.weights[turn]), smem_address(smem.ring[stage].ckv),
                    warp_idx * FEATS / 8);
                issue_by_half(true, Cta::AHEAD && more);
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                turn ^= 1;
            }
            if (!more) {
                break;
            }
            const bool copies = !Cta::AHEAD && token + 2 * TOKENS < end_token;
            if constexpr (!Cta::AHEAD) {
                cp_async_wait_group<STAGES - 2>();
                __syncthreads();  // the next step's keys are there, and the buffer before is free
                issue_by_half(false, copies);
            }

            // Weights of the warp's own keys of the next step.
            const auto& buffer = smem.ring[stage];
            float s_pe[4];
            multiply_latent_keys<Ring::CKV_ROW_BYTES, 4>(
                s[0][0], q_nope, smem_address(buffer.ckv) + own * Ring::CKV_ROW_BYTES);
            multiply_latent_keys<Ring::KPE_ROW_BYTES, 1>(
                s_pe, q_pe, smem_address(buffer.kpe) + own * Ring::KPE_ROW_BYTES);
            each_score(s, [&](float& x, int, int half_idx, int, int column) {
                const float2 scales = smem.scales[row + half_idx * 8];
                x = fmaf(x, scales.x, s_pe[half_idx * 2 + column % 2] * scales.y);
            });
            const uint32_t keys = smem.keys[stage][warp_idx];
            const int32_t first = token + TOKENS + own;
            if (keys != 0xff || first + 8 > sight.all_to) {
                const int32_t last[2] = {
                    LatentSight::last(p, item, row) - first,
                    LatentSight::last(p, item, row + 8) - first};
                each_score(s, [&](float& x, int, int half_idx, int, int local) {
                    x = (keys >> local & 1) && local <= last[half_idx] ? x : NO_KEY;
                });
            }
            rises = warp.weigh(weights, s[0][0]);
            put_weights();
            issue_by_half(true, copies);
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
        const TileSlots slots{{p.work, item, block}};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            d[i] = 0.0f;
#pragma unroll
            for (int j = 0; j < WARPS; ++j) {
                d[i] += smem.maxima[row + i * 8][j];
            }
            if (warp_idx == 0 && lane_idx % 4 == 0 && !whole) {
                slots.slots.store_state(warp.m[0][i], d[i], row + i * 8);
            }
            if (whole) {
                const LatentRow to(p, item, block, row + i * 8);
                to.template store<4>(LatentRow::factor(p, d[i]), [&](auto visit) {
                    warp.template each_vector<CKV>(0, i, [&](const float (&sums)[4], int feat) {
                        visit(sums, warp_idx * FEATS + feat);
                    });
                });
                if (warp_idx == 0 && lane_idx % 4 == 0) {
                    to.store_lse(warp.m[0][i], d[i]);
                }
            } else {
                slots.store(row + i * 8, warp_idx, [&](int tile, int column) {
                    return warp.o[0][tile][2 * i + column];
                });
            }
        }
        __syncthreads();  // the slot is written, the item and the denominators have been read
        if (threadIdx.x == 0) {
            smem.gates[item_idx > smem.first_item].arrive(p.work, item, block);
        }
        if (++item_idx >= end_item) {
            break;
        }
        const Item next = load_item(p.work.items + item_idx);
        on_way.load(p, next, block);
        if (threadIdx.x == 0) {
            smem.item = next;
        }
    }

    // 5 shares of the tiles that other CTAs work on too: only the first and the last item's
    const int num_gates = min(end_item - smem.first_item, 2);
#pragma unroll 1
    for (int i = 0; i < num_gates; ++i) {
        auto& gate = smem.gates[i];
        if (threadIdx.x == 0) {
            gate.wait(p.work, block);
        }
        __syncthreads();  // the slots are there
        const auto sync = [] { __syncthreads(); };
        using Merge = LatentMerge<TileSlots, Cta::THREADS, decltype(sync)>;
        static_assert(sizeof(smem.ring) >= sizeof(typename Merge::Scratch), "the ring is free");
        auto& scratch = reinterpret_cast<typename Merge::Scratch&>(smem.ring);
        Merge{p, gate.item, block, static_cast<int>(threadIdx.x), scratch, sync}.merge(gate.shares);
    }
}

}  // namespace cukv
