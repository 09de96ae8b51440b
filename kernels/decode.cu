// decode -- attend from tiles of packed query rows to paged keys, item by item of a work list.
//
//   s[r, j] = sm_scale * q[r] . k[j] (soft-capped), for the keys j of the item that row r sees
//   o[r] = sum_j softmax(s[r])[j] * v[j],  lse[r] = log2(sum_j 2^(s[r, j] * log2(e)))
//
// The query heads of a KV head, times the query rows of a request, are the rows of a tile of at
// most ROWS. A CTA owns one KV head and one part of the work list. Warp w takes every WARPS-th step
// of TOKENS keys of the part through a ring of buffers of its own, so that loads run ahead across
// items; the warps' states merge in shared memory at the end of each item, and the states of a tile
// of several items in the CTA that finishes last.
// Bound by HBM: the K and V rows of one KV head, once. The CTAs of all KV heads walk side by side,
// so that the heads of an NHD page are read close in time.
// Host: cukv/paged.py PagedKVCache.decode, PagedKVCache.prefill
// Reference: cukv/reference.py decode
#include "common/queries.cuh"
#include "common/work.cuh"

namespace cukv {

struct DecodeParams {
    PageTable table;    // of it the page ids: lengths are the work list's
    const char* q;      // [rows, num_qo_heads, head_dim]
    char* o;            // [rows, num_qo_heads, head_dim_vo]
    char* lse;          // [rows, num_qo_heads] float32, base 2, or null
    const char* sinks;  // [num_qo_heads], or null
    WorkList work;
    Scale q_scale;
    Scale k_scale;
    Scale v_scale;
    Pages k_cache;
    Pages v_cache;
    QueryRows q_rows;
    QueryRows o_rows;
    QueryRows lse_rows;
    int64_t sinks_stride;  // bytes
    Divisor group;         // by group_size
    int32_t sinks_kind;
    int32_t head_dim;
    int32_t head_dim_vo;
    float sm_scale;
    float logits_soft_cap;  // 0: off
    int32_t causal;
    int32_t window_left;  // -1: off
    int32_t evict_first;  // 1: keys and values leave the L2 first
};

static_assert(sizeof(DecodeParams) == PARAMS_BYTES, "host and device disagree on the parameters");


// Two fp8 numbers, exactly, as a pair of halves.
template <typename KV>
__device__ __forceinline__ uint32_t halves_of(uint32_t two_bytes) {
    constexpr auto FORMAT = is_same<KV, fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
    const __half2_raw pair =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two_bytes), FORMAT);
    return static_cast<uint32_t>(pair.x) | static_cast<uint32_t>(pair.y) << 16;
}

// tanh by two exact-enough instructions: absolute error below 2^-21.
__device__ __forceinline__ float tanh_by_ex2(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + ex2(x * (2.0f * LOG2_E)));
}

// Geometry of one specialisation, and the steps of a warp and of the CTA.
template <
    typename KV_,
    int HEAD_DIM_QK_,
    int HEAD_DIM_VO_,
    int ROWS_,
    int WARPS_,
    int TOKENS_,
    int STAGES_,
    bool ALIGNED_>
struct DecodeCta {
    using KV = KV_;
    // fp8 becomes half, which holds it exactly; queries are scaled by powers of two to fit.
    static constexpr bool FP8 = is_fp8<KV>;
    using Operand = typename Select<FP8, half, KV>::type;

    static constexpr int HEAD_DIM_QK = HEAD_DIM_QK_, HEAD_DIM_VO = HEAD_DIM_VO_;
    static constexpr int ROWS = ROWS_, WARPS = WARPS_, TOKENS = TOKENS_, STAGES = STAGES_;
    static constexpr bool ALIGNED = ALIGNED_;
    static constexpr int THREADS = WARPS * WARP_SIZE;
    static constexpr int K_ROW_BYTES = HEAD_DIM_QK * sizeof(KV);
    static constexpr int V_ROW_BYTES = HEAD_DIM_VO * sizeof(KV);
    static constexpr int K_BYTES = TOKENS * K_ROW_BYTES, V_BYTES = TOKENS * V_ROW_BYTES;
    static constexpr int M_TILES = ROWS <= 16 ? 1 : ROWS / 16;
    static constexpr int HALVES = ROWS == 8 ? 1 : 2;  // rows of an m16 tile that a lane holds
    static constexpr int TOKEN_TILES = TOKENS / 8, FEAT_TILES = HEAD_DIM_VO / 8;
    static constexpr int K_STEPS = HEAD_DIM_QK / 16;
    static constexpr int Q_STRIDE = HEAD_DIM_QK + 8;  // elements; rows fall on different banks
    static constexpr int O_STRIDE = HEAD_DIM_VO + 8;
    static constexpr bool Q_STAYS = ROWS <= 16 && HEAD_DIM_QK <= 128;  // in registers

    static_assert(ROWS == 8 || ROWS % 16 == 0, "rows are whole tiles of a tensor core");
    static_assert(K_ROW_BYTES % 128 == 0 && V_ROW_BYTES % 128 == 0, "swizzling needs 128 bytes");
    static_assert(FP8 ? TOKENS == 32 : TOKENS == 16 || TOKENS == 32, "a lane looks up a token");
    static_assert((WARPS & (WARPS - 1)) == 0, "steps are dealt round robin");

    // Buffers begin at multiples of 1024 bytes: with 16 the copies into them lose 10 % and more.
    struct Smem {
        alignas(1024) char ring[WARPS][STAGES][K_BYTES + V_BYTES];
        float o[WARPS][ROWS][O_STRIDE];
        Operand q[2][ROWS][Q_STRIDE];  // of this item and of the next
        float q_factor[2][ROWS];       // what was divided out of the rows
        float m[WARPS][ROWS];
        float d[WARPS][ROWS];
        uint32_t keys[WARPS][STAGES];    // of a buffer: one bit per token
        int32_t last;                    // whether this CTA has the last ticket
    };

    // Byte of 16-byte chunk `chunk` of a row of a buffer: conflict-free for ldmatrix.
    template <int ROW_BYTES>
    static __device__ __forceinline__ int swizzled(int row, int chunk) {
        return (row >> 3) * (8 * ROW_BYTES) + (chunk >> 3) * 1024 + (row & 7) * 128 +
               (((chunk ^ row) & 7) << 4);
    }

    // ------------------------------------------------------------------------------------ loading

    static __device__ __forceinline__ int32_t num_steps(const Item& item) {
        return (item.end_token - item.first_token + TOKENS - 1) / TOKENS;
    }

    // A warp's way through the keys of its part, ahead of the arithmetic.
    struct Loader {
        const DecodeParams& p;
        Smem& smem;
        int warp_idx, lane_idx, kv_head;
        int32_t item_idx, end_item;
        int32_t first_token, end_token;  // of the item
        int64_t first_page;
        int32_t token;     // the next step: [token, token + TOKENS) before end_token
        IndexEntry page;   // id of this lane's token of that step, on its way
        int32_t entry;     // of this lane's token within its page
        bool in_item;      // whether this lane's token is before end_token
        uint64_t policy;

        __device__ __forceinline__ Loader(
            const DecodeParams& p,
            Smem& smem,
            int kv_head,
            const Item& first,
            int32_t first_item,
            int32_t end_item)
            : p(p),
              smem(smem),
              warp_idx(threadIdx.x / WARP_SIZE),
              lane_idx(threadIdx.x % WARP_SIZE),
              kv_head(kv_head),
              item_idx(first_item),
              end_item(end_item) {
            policy = p.evict_first ? createpolicy_evict_first() : createpolicy_evict_unchanged();
            int32_t step = warp_idx;
            if (item_idx < end_item && !enter(first, step)) {
                leave(step);
            }
        }

        // Goes to step `step` of an item, or takes the item's steps off it if there are fewer.
        __device__ __forceinline__ bool enter(const Item& item, int32_t& step) {
            const int32_t steps = num_steps(item);
            if (step >= steps) {
                step -= steps;
                return false;
            }
            first_page = item.first_page;
            first_token = item.first_token;
            end_token = item.end_token;
            token = first_token + step * TOKENS;
            look_up();
            return true;
        }

        // Goes to step `step` of the steps behind the item.
        __device__ __forceinline__ void leave(int32_t step) {
            do {
                ++item_idx;
            } while (item_idx < end_item && !enter(p.work.items[item_idx], step));
        }

        __device__ __forceinline__ void look_up() {
            const int32_t own = token + lane_idx % TOKENS;
            const uint32_t page_idx = p.table.page_divisor.quotient(own);
            entry = own - page_idx * p.table.page_divisor.divisor;
            in_item = own < end_token;
            page = p.table.indices.entry(in_item ? first_page + page_idx : first_page);
        }

        // Starts the copies of the next step into a buffer, and looks up the one after.
        __device__ __forceinline__ void issue(int stage) {
            if (item_idx < end_item) {
                const int64_t id = page.value(p.table.indices);
                const bool has_key = in_item && p.k_cache.has(id) && p.v_cache.has(id);
                const uint32_t keys = __ballot_sync(0xffffffffu, has_key);
                if (lane_idx == 0) {
                    smem.keys[warp_idx][stage] = keys;
                }
                char* buffer = smem.ring[warp_idx][stage];
                copy<K_ROW_BYTES>(buffer, p.k_cache, p.head_dim, id, has_key, keys);
                copy<V_ROW_BYTES>(buffer + K_BYTES, p.v_cache, p.head_dim_vo, id, has_key, keys);
            }
            cp_async_commit_group();
            if (item_idx < end_item) {
                token += WARPS * TOKENS;
                if (token < end_token) {
                    look_up();
                } else {
                    const int32_t steps = (end_token - first_token + TOKENS - 1) / TOKENS;
                    leave((token - first_token) / TOKENS - steps);
                }
            }
        }

        // Copies a row of TOKENS tokens; a token that is no key becomes zeros.
        template <int ROW_BYTES>
        __device__ __forceinline__ void copy(
            char* buffer, const Pages& cache, int head_dim, int64_t id, bool has_key, uint32_t keys) {
            const int64_t own = has_key ? id * cache.page_stride + entry * cache.token_stride : 0;
            const char* head = cache.base + kv_head * cache.head_stride;
            if constexpr (ALIGNED) {
                constexpr int LANES = ROW_BYTES < 512 ? ROW_BYTES / 16 : WARP_SIZE;  // of a row
                constexpr int ROWS_AT_ONCE = WARP_SIZE / LANES;
                const int chunk = lane_idx % LANES;
                const bool loads = chunk * 16 < head_dim * int{sizeof(KV)};
                const uint32_t to = smem_address(buffer);
#pragma unroll 8
                for (int i = 0; i < TOKENS; i += ROWS_AT_ONCE) {
                    const int row = i + lane_idx / LANES;
                    const int64_t offset = __shfl_sync(0xffffffffu, own, row);
                    if (loads) {
                        cp_async_16(
                            to + swizzled<ROW_BYTES>(row, chunk), head + offset + chunk * 16,
                            (keys >> row & 1) * 16, policy);
                    }
                }
            } else {
                for (int row = 0; row < TOKENS; ++row) {
                    const int64_t offset = __shfl_sync(0xffffffffu, own, row);
                    const KV* from = reinterpret_cast<const KV*>(head + offset);
                    for (int feat = lane_idx; feat < head_dim; feat += WARP_SIZE) {
                        const int byte = feat * sizeof(KV);
                        KV* to = reinterpret_cast<KV*>(
                            buffer + swizzled<ROW_BYTES>(row, byte / 16) + byte % 16);
                        *to = keys >> row & 1 ? from[feat] : KV(0.0f);
                    }
                }
            }
        }
    };

    // ------------------------------------------------------------------------------------ queries

    // A thread's share of a tile's rows of q: loaded an item ahead, then stored as operands.
    struct Queries {
        static constexpr int CHUNKS = HEAD_DIM_QK / 8;  // of a row
        static constexpr int NUM = ROWS * CHUNKS < THREADS ? 1 : ROWS * CHUNKS / THREADS;
        Query8 x[NUM];

        // Zeros past the tile's rows and head_dim.
        __device__ __forceinline__ void load(const DecodeParams& p, const Item& item, int kv_head) {
#pragma unroll
            for (int i = 0; i < NUM; ++i) {
                const int row = (threadIdx.x + i * THREADS) / CHUNKS;
                const int feat = threadIdx.x % CHUNKS * 8;
                x[i].bits = uint4{};
                if (row < item.num_rows && feat < p.head_dim) {
                    const uint32_t packed = item.first_row + row;
                    const uint32_t q_row = p.group.quotient(packed);
                    const int64_t head =
                        int64_t{kv_head} * p.group.divisor + packed - q_row * p.group.divisor;
                    const char* from = p.q + (item.first_q_row + q_row) * p.q_rows.row_stride +
                                       head * p.q_rows.head_stride;
                    x[i].load(
                        from + feat * element_bytes(p.q_rows.kind), p.q_rows.kind,
                        p.q_rows.aligned);
                }
            }
        }

        __device__ __forceinline__ void store(const DecodeParams& p, Smem& smem, int buffer) {
            constexpr int KIND = is_same<Operand, half> ? KIND_HALF : KIND_BFLOAT16;
#pragma unroll
            for (int i = 0; i < NUM; ++i) {
                const int row = (threadIdx.x + i * THREADS) / CHUNKS;
                if (row >= ROWS) {  // of whole warps only
                    return;
                }
                Vec<Operand, 8> y;
                y.raw = x[i].bits;
                if (FP8 || p.q_rows.kind != KIND) {
                    float floats[8];
                    x[i].to_floats(floats, p.q_rows.kind);
                    if constexpr (FP8) {
                        scale_to_half(floats, smem.q_factor[buffer][row]);
                    }
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        y[e] = from_float<Operand>(floats[e]);
                    }
                }
                store_vec(
                    reinterpret_cast<char*>(&smem.q[buffer][row][threadIdx.x % CHUNKS * 8]), y);
            }
        }

        // Divides a row by the power of two of its largest element: halves then lose only elements
        // below 2^-24 of it.
        static __device__ __forceinline__ void scale_to_half(float (&x)[8], float& factor) {
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                largest = fmaxf(largest, fabsf(x[i]));
            }
#pragma unroll
            for (int distance = CHUNKS / 2; distance > 0; distance /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
            }
            // 2^e <= largest < 2^(e + 1), kept where 2^e and 2^-e are both normal numbers
            const int bits = min(max(__float_as_int(largest) >> 23, 1), 253);
            const float inverse = __int_as_float((254 - bits) << 23);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                x[i] *= inverse;
            }
            factor = __int_as_float(bits << 23);  // the same from every lane of the row
        }
    };

    using QFragment = uint32_t[2 * HALVES];

    static __device__ __forceinline__ void
    load_fragment(QFragment& a, const Smem& smem, int buffer, int m_tile, int k_step) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        const int row = m_tile * 16 + lane_idx / 4;
#pragma unroll
        for (int half_idx = 0; half_idx < HALVES; ++half_idx) {
            const Operand* q = &smem.q[buffer][row + half_idx * 8][k_step * 16];
            if constexpr (FP8) {  // columns in the order in which 4 bytes of a key reach a lane
                const uint2 pair = *reinterpret_cast<const uint2*>(q + lane_idx % 4 * 4);
                a[half_idx] = pair.x;
                a[HALVES + half_idx] = pair.y;
            } else {
                a[half_idx] = *reinterpret_cast<const uint32_t*>(q + lane_idx % 4 * 2);
                a[HALVES + half_idx] = *reinterpret_cast<const uint32_t*>(q + lane_idx % 4 * 2 + 8);
            }
        }
    }

    // ----------------------------------------------------------------------------------- products

    using Scores = float[M_TILES][TOKEN_TILES][2 * HALVES];
    using Sums = float[M_TILES][FEAT_TILES][2 * HALVES];
    using Fragments = uint32_t[Q_STAYS ? M_TILES : 1][Q_STAYS ? K_STEPS : 1][2 * HALVES];

    // s = q k^T for the keys of a buffer.
    static __device__ __forceinline__ void
    multiply_keys(
        Scores& s, const Fragments& fragments, const Smem& smem, int q_buffer, const char* buffer) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        const uint32_t keys = smem_address(buffer);
#pragma unroll(Q_STAYS ? K_STEPS : 4)
        for (int k_step = 0; k_step < K_STEPS; ++k_step) {
            QFragment a[M_TILES];
#pragma unroll
            for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
                if constexpr (Q_STAYS) {
#pragma unroll
                    for (int i = 0; i < 2 * HALVES; ++i) {
                        a[m_tile][i] = fragments[m_tile][k_step][i];
                    }
                } else {
                    load_fragment(a[m_tile], smem, q_buffer, m_tile, k_step);
                }
            }
            uint32_t b[4];
            if constexpr (FP8) {
#pragma unroll
                for (int j = 0; j < TOKENS; j += 32) {
                    ldmatrix_x4(b, keys + swizzled<K_ROW_BYTES>(j + lane_idx, k_step));
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const uint32_t b0 = halves_of<KV>(b[i] & 0xffffu);
                        const uint32_t b1 = halves_of<KV>(b[i] >> 16);
#pragma unroll
                        for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
                            mma_m16n8k16<Operand>(s[m_tile][j / 8 + i], a[m_tile], b0, b1);
                        }
                    }
                }
            } else {
#pragma unroll
                for (int j = 0; j < TOKENS; j += 16) {
                    const int row = j + (lane_idx & 7) + (lane_idx >> 4) * 8;
                    const int chunk = 2 * k_step + (lane_idx >> 3 & 1);
                    ldmatrix_x4(b, keys + swizzled<K_ROW_BYTES>(row, chunk));
#pragma unroll
                    for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
                        mma_m16n8k16<Operand>(s[m_tile][j / 8], a[m_tile], b[0], b[1]);
                        mma_m16n8k16<Operand>(s[m_tile][j / 8 + 1], a[m_tile], b[2], b[3]);
                    }
                }
            }
        }
    }

    // Weights of 16 tokens as the left operand of a tensor core.
    static __device__ __forceinline__ void
    pack_weights(QFragment& a, const float (&low)[2 * HALVES], const float (&high)[2 * HALVES]) {
#pragma unroll
        for (int half_idx = 0; half_idx < HALVES; ++half_idx) {
            a[half_idx] = cvt_pair<Operand>(low[2 * half_idx], low[2 * half_idx + 1]);
            a[HALVES + half_idx] = cvt_pair<Operand>(high[2 * half_idx], high[2 * half_idx + 1]);
        }
    }

    // o += s v for the values of a buffer, with s the weights. Of fp8 the columns of a pair of tiles
    // alternate: tile 2 i holds the even ones of 16, tile 2 i + 1 the odd ones.
    static __device__ __forceinline__ void
    multiply_values(Sums& o, const Scores& s, const char* buffer) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
        const uint32_t values = smem_address(buffer) + K_BYTES;
        QFragment a[TOKENS / 16][M_TILES];
#pragma unroll
        for (int j = 0; j < TOKENS / 16; ++j) {
#pragma unroll
            for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
                pack_weights(a[j][m_tile], s[m_tile][2 * j], s[m_tile][2 * j + 1]);
            }
        }
        uint32_t b[4];
        if constexpr (FP8) {
#pragma unroll
            for (int chunk = 0; chunk < HEAD_DIM_VO / 16; ++chunk) {
                if (chunk % 4 == 0) {
                    __syncwarp();  // keeps the compiler from loading all chunks first, and spilling
                }
                ldmatrix_x4_trans(b, values + swizzled<V_ROW_BYTES>(lane_idx, chunk));
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const uint32_t low = __byte_perm(b[2 * j], 0, 0x3120);
                    const uint32_t high = __byte_perm(b[2 * j + 1], 0, 0x3120);
                    const uint32_t even0 = halves_of<KV>(low & 0xffffu);
                    const uint32_t even1 = halves_of<KV>(high & 0xffffu);
                    const uint32_t odd0 = halves_of<KV>(low >> 16);
                    const uint32_t odd1 = halves_of<KV>(high >> 16);
#pragma unroll
                    for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
                        float(&even)[2 * HALVES] = o[m_tile][2 * chunk];
                        float(&odd)[2 * HALVES] = o[m_tile][2 * chunk + 1];
                        mma_m16n8k16<Operand>(even, a[j][m_tile], even0, even1);
                        mma_m16n8k16<Operand>(odd, a[j][m_tile], odd0, odd1);
                    }
                }
            }
        } else {
#pragma unroll
            for (int j = 0; j < TOKENS / 16; ++j) {
#pragma unroll
                for (int tile = 0; tile < FEAT_TILES; tile += 2) {
                    const int row = j * 16 + (lane_idx & 7) + (lane_idx >> 3 & 1) * 8;
                    const int chunk = tile + (lane_idx >> 4);
                    ldmatrix_x4_trans(b, values + swizzled<V_ROW_BYTES>(row, chunk));
#pragma unroll
                    for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
                        mma_m16n8k16<Operand>(o[m_tile][tile], a[j][m_tile], b[0], b[1]);
                        mma_m16n8k16<Operand>(o[m_tile][tile + 1], a[j][m_tile], b[2], b[3]);
                    }
                }
            }
        }
    }

    // ------------------------------------------------------------------------------------ softmax

    // What scores are multiplied by, so that they are in base 2; and the cap, 0 if off.
    struct Logits {
        float scale;
        float cap;  // in base 2

        __device__ __forceinline__ explicit Logits(const DecodeParams& p) {
            const float natural = p.sm_scale * p.q_scale.get() * p.k_scale.get();
            cap = p.logits_soft_cap * LOG2_E;
            scale = p.logits_soft_cap > 0.0f ? natural / p.logits_soft_cap : natural * LOG2_E;
        }
    };

    // Which tokens the rows of a tile see, beyond the limits of the item, which hold for all.
    struct Sight {
        int32_t all_from, all_to;  // every row sees these: no mask
        int32_t first_row, diagonal;

        __device__ __forceinline__ Sight(const DecodeParams& p, const Item& item) {
            first_row = item.first_row;
            diagonal = item.diagonal;
            const int32_t first_q = p.group.quotient(first_row);
            const int32_t last_q = p.group.quotient(first_row + item.num_rows - 1);
            all_from = p.window_left < 0 ? 0 : diagonal + last_q - p.window_left;
            all_to = p.causal ? diagonal + first_q + 1 : 0x7fffffff;
        }

        __device__ __forceinline__ bool
        sees(const DecodeParams& p, int row, int32_t token) const {
            const int32_t position = diagonal + static_cast<int32_t>(p.group.quotient(first_row + row));
            return (!p.causal || token <= position) &&
                   (p.window_left < 0 || token >= position - p.window_left);
        }
    };

    struct Warp {
        float m[M_TILES][HALVES];
        float d[M_TILES][HALVES];
        float scale[M_TILES][HALVES];
        Sums o;
    };

    // Turns scores into logits in base 2, -inf where a row does not see a token.
    static __device__ __forceinline__ void mask_and_scale(
        Scores& s, const Warp& warp, const DecodeParams& p, const Logits& logits, const Sight& sight, int32_t token, uint32_t keys) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
#pragma unroll
        for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
#pragma unroll
            for (int tile = 0; tile < TOKEN_TILES; ++tile) {
#pragma unroll
                for (int i = 0; i < 2 * HALVES; ++i) {
                    s[m_tile][tile][i] *= warp.scale[m_tile][i / 2];
                }
            }
        }
        if (logits.cap > 0.0f) {
#pragma unroll
            for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
#pragma unroll
                for (int tile = 0; tile < TOKEN_TILES; ++tile) {
#pragma unroll
                    for (int i = 0; i < 2 * HALVES; ++i) {
                        s[m_tile][tile][i] = logits.cap * tanh_by_ex2(s[m_tile][tile][i]);
                    }
                }
            }
        }
        const bool rows_differ = token < sight.all_from || token + TOKENS > sight.all_to;
        constexpr uint32_t ALL = TOKENS == 32 ? 0xffffffffu : (1u << TOKENS) - 1;
        if ((keys & ALL) == ALL && !rows_differ) {
            return;
        }
#pragma unroll
        for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
#pragma unroll
            for (int tile = 0; tile < TOKEN_TILES; ++tile) {
#pragma unroll
                for (int i = 0; i < 2 * HALVES; ++i) {
                    const int local = tile * 8 + lane_idx % 4 * 2 + i % 2;
                    const int row = m_tile * 16 + i / 2 * 8 + lane_idx / 4;
                    bool seen = keys >> local & 1;
                    if (rows_differ) {
                        seen = seen && sight.sees(p, row, token + local);
                    }
                    s[m_tile][tile][i] = seen ? s[m_tile][tile][i] : NO_KEY;
                }
            }
        }
    }

    // Turns logits into weights relative to the row's maximum, which the step may raise.
    static __device__ __forceinline__ void weigh(Scores& s, Warp& warp) {
#pragma unroll
        for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
            float factor[HALVES];
#pragma unroll
            for (int half_idx = 0; half_idx < HALVES; ++half_idx) {
                float m = warp.m[m_tile][half_idx];
                const float m_old = m;
#pragma unroll
                for (int tile = 0; tile < TOKEN_TILES; ++tile) {
                    const float* pair = &s[m_tile][tile][2 * half_idx];
                    m = fmaxf(m, fmaxf(pair[0], pair[1]));
                }
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
                m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
                const float base = m > NO_KEY ? m : 0.0f;  // weights of no keys are 0
                factor[half_idx] = ex2(m_old - base);
                float sum = 0.0f;
#pragma unroll
                for (int tile = 0; tile < TOKEN_TILES; ++tile) {
                    float* pair = &s[m_tile][tile][2 * half_idx];
                    pair[0] = ex2(pair[0] - base);
                    pair[1] = ex2(pair[1] - base);
                    sum += pair[0] + pair[1];
                }
                warp.m[m_tile][half_idx] = m;
                warp.d[m_tile][half_idx] = warp.d[m_tile][half_idx] * factor[half_idx] + sum;
            }
#pragma unroll
            for (int tile = 0; tile < FEAT_TILES; ++tile) {
#pragma unroll
                for (int i = 0; i < 2 * HALVES; ++i) {
                    warp.o[m_tile][tile][i] *= factor[i / 2];
                }
            }
        }
    }

    // -------------------------------------------------------------------------------------- merge

    static __device__ __forceinline__ void store_warp(Smem& smem, Warp& warp) {
        const int warp_idx = threadIdx.x / WARP_SIZE, lane_idx = threadIdx.x % WARP_SIZE;
#pragma unroll
        for (int m_tile = 0; m_tile < M_TILES; ++m_tile) {
#pragma unroll
            for (int half_idx = 0; half_idx < HALVES; ++half_idx) {
                const int row = m_tile * 16 + half_idx * 8 + lane_idx / 4;
                float d = warp.d[m_tile][half_idx];
                d += __shfl_xor_sync(0xffffffffu, d, 1);
                d += __shfl_xor_sync(0xffffffffu, d, 2);
                if (lane_idx % 4 == 0) {
                    smem.m[warp_idx][row] = warp.m[m_tile][half_idx];
                    smem.d[warp_idx][row] = d;
                }
                float* o = smem.o[warp_idx][row];
#pragma unroll
                for (int tile = 0; tile < FEAT_TILES; tile += 2) {
                    const float* even = &warp.o[m_tile][tile][2 * half_idx];
                    const float* odd = &warp.o[m_tile][tile + 1][2 * half_idx];
                    if constexpr (FP8) {
                        *reinterpret_cast<float4*>(o + tile * 8 + lane_idx % 4 * 4) =
                            make_float4(even[0], odd[0], even[1], odd[1]);
                    } else {
                        float* to = o + tile * 8 + lane_idx % 4 * 2;
                        *reinterpret_cast<float2*>(to) = make_float2(even[0], even[1]);
                        *reinterpret_cast<float2*>(to + 8) = make_float2(odd[0], odd[1]);
                    }
                }
            }
        }
    }

    // Merges the states of the warps, in the order of the item's steps.
    static __device__ __forceinline__ State<1, 4>
    merge_warps(const Smem& smem, int row, int feat, int first_warp) {
        float m[WARPS];
        State<1, 4> state;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            m[i] = smem.m[(first_warp + i) % WARPS][row];
            state.m = fmaxf(state.m, m[i]);
        }
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const int warp_idx = (first_warp + i) % WARPS;
            const float4 x = *reinterpret_cast<const float4*>(&smem.o[warp_idx][row][feat]);
            const float o[1][4] = {{x.x, x.y, x.z, x.w}};
            state.add(m[i], smem.d[warp_idx][row], o);
        }
        return state;
    }

    static __device__ __forceinline__ int64_t
    slot_row(const DecodeParams& p, int32_t slot, int kv_head, int row) {
        return (int64_t{slot} * p.work.num_kv_heads + kv_head) * ROWS + row;
    }

    static __device__ __forceinline__ void store_slot(
        const DecodeParams& p, const State<1, 4>& state, int64_t slot_row, int feat) {
        *reinterpret_cast<float4*>(p.work.sums + slot_row * HEAD_DIM_VO + feat) =
            make_float4(state.o[0][0], state.o[0][1], state.o[0][2], state.o[0][3]);
        if (feat == 0) {
            *reinterpret_cast<float2*>(p.work.states + slot_row * 2) =
                make_float2(state.m, state.d);
        }
    }

    // Merges the slots of a tile, in the order of its keys.
    static __device__ __forceinline__ State<1, 4> merge_slots(
        const DecodeParams& p, const Item& item, int kv_head, int row, int feat) {
        constexpr int IN_FLIGHT = 16;
        State<1, 4> state;
        for (int base = 0; base < item.num_items; base += IN_FLIGHT) {
            float2 md[IN_FLIGHT];
            float4 o[IN_FLIGHT];
            float m = state.m;
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                const int idx = min(base + i, item.num_items - 1);
                const int64_t from = slot_row(p, item.slot(idx), kv_head, row);
                md[i] = __ldcg(reinterpret_cast<const float2*>(p.work.states + from * 2));
                o[i] = __ldcg(
                    reinterpret_cast<const float4*>(p.work.sums + from * HEAD_DIM_VO + feat));
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                m = fmaxf(m, md[i].x);
            }
            state.raise(m);
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                if (base + i < item.num_items) {
                    const float x[1][4] = {{o[i].x, o[i].y, o[i].z, o[i].w}};
                    state.add(md[i].x, md[i].y, x);
                }
            }
        }
        return state;
    }

    // Adds the sink and stores a finished row's vector.
    static __device__ __forceinline__ void finish(
        const DecodeParams& p, State<1, 4>& state, const Item& item, int kv_head, int row, int feat) {
        const uint32_t packed = item.first_row + row;
        const uint32_t q_row = p.group.quotient(packed);
        const int64_t head = int64_t{kv_head} * p.group.divisor + packed - q_row * p.group.divisor;
        const int64_t out_row = item.first_q_row + q_row;
        if (p.sinks != nullptr) {
            const float sink =
                LOG2_E * load_element(p.sinks + head * p.sinks_stride, p.sinks_kind);
            state.raise(fmaxf(state.m, sink));
            state.d += state.weight(sink);
        }
        char* to = p.o + out_row * p.o_rows.row_stride + head * p.o_rows.head_stride;
        const int bytes = element_bytes(p.o_rows.kind);
        store_4(to + feat * bytes, state, p.v_scale.get(), p.o_rows.kind, p.o_rows.aligned);
        if (feat == 0 && p.lse != nullptr) {
            char* lse = p.lse + out_row * p.lse_rows.row_stride + head * p.lse_rows.head_stride;
            *reinterpret_cast<float*>(lse) = state.lse();
        }
    }

    // Calls visit(row, feat) for this thread's vectors of 4 features of the tile's rows.
    template <typename Visit>
    static __device__ __forceinline__ void
    each_vector(const DecodeParams& p, const Item& item, Visit visit) {
        constexpr int VECS = HEAD_DIM_VO / 4;
        for (int i = threadIdx.x; i < item.num_rows * VECS; i += THREADS) {
            const int row = i / VECS, feat = i % VECS * 4;
            if (feat < p.head_dim_vo) {
                visit(row, feat);
            }
        }
    }

    // Whether this CTA is the last of those that work on the tile: then all its slots are written.
    static __device__ __forceinline__ bool
    takes_last_ticket(const DecodeParams& p, Smem& smem, const Item& item, int kv_head) {
        __syncthreads();  // the slot is written; thread 0 publishes it for all
        if (threadIdx.x == 0) {
            int32_t* ticket =
                p.work.tickets + int64_t{item.first_slot} * p.work.num_kv_heads + kv_head;
            __threadfence();
            smem.last = atomicAdd(ticket, 1) == item.num_items - 1;
            __threadfence();
            if (smem.last) {
                *ticket = 0;  // for the next launch
            }
        }
        __syncthreads();
        return smem.last;
    }
};

template <
    typename KV,
    int HEAD_DIM_QK,
    int HEAD_DIM_VO,
    int ROWS,
    int WARPS,
    int TOKENS,
    int STAGES,
    int MIN_CTAS,
    bool ALIGNED>
__global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)
    decode(const __grid_constant__ DecodeParams p) {
    using Cta = DecodeCta<KV, HEAD_DIM_QK, HEAD_DIM_VO, ROWS, WARPS, TOKENS, STAGES, ALIGNED>;
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<typename Cta::Smem*>(smem_bytes);
    const int warp_idx = threadIdx.x / WARP_SIZE;

    // 1 the CTA's part, and its first keys and queries on their way
    const int kv_head = blockIdx.x % p.work.num_kv_heads;
    const int part = blockIdx.x / p.work.num_kv_heads;
    Item item = p.work.first_items[part];
    const int32_t first_item = p.work.part_begin[part], end_item = p.work.part_end[part];
    if (first_item >= end_item) {
        return;
    }
    if (p.head_dim < HEAD_DIM_QK) {  // no garbage where the copies write nothing
        char* ring = smem.ring[warp_idx][0];
        constexpr int RING_BYTES = STAGES * (Cta::K_BYTES + Cta::V_BYTES);
        for (int i = threadIdx.x % WARP_SIZE * 16; i < RING_BYTES; i += WARP_SIZE * 16) {
            *reinterpret_cast<uint4*>(ring + i) = uint4{};
        }
        __syncwarp();
    }
    typename Cta::Loader loader(p, smem, kv_head, item, first_item, end_item);
    typename Cta::Queries queries;
    queries.load(p, item, kv_head);
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) {
        loader.issue(stage);
    }
    queries.store(p, smem, 0);
    __syncthreads();  // queries are there

    const typename Cta::Logits logits(p);
    int stage = 0;
    int first_warp = 0;  // takes the first step of the item
    for (int32_t item_idx = first_item; item_idx < end_item; ++item_idx) {
        // 2 this item's queries, and the next one's on their way
        const int q_buffer = (item_idx - first_item) & 1;
        typename Cta::Fragments fragments;
        if constexpr (Cta::Q_STAYS) {
#pragma unroll
            for (int m_tile = 0; m_tile < Cta::M_TILES; ++m_tile) {
#pragma unroll
                for (int k_step = 0; k_step < Cta::K_STEPS; ++k_step) {
                    Cta::load_fragment(fragments[m_tile][k_step], smem, q_buffer, m_tile, k_step);
                }
            }
        }
        const bool has_next = item_idx + 1 < end_item;
        if (has_next) {
            queries.load(p, p.work.items[item_idx + 1], kv_head);
        }

        // 3 this warp's steps
        const typename Cta::Sight sight(p, item);
        typename Cta::Warp warp = {};
#pragma unroll
        for (int i = 0; i < Cta::M_TILES * Cta::HALVES; ++i) {
            const int m_tile = i / Cta::HALVES, half_idx = i % Cta::HALVES;
            const int row = m_tile * 16 + half_idx * 8 + threadIdx.x % WARP_SIZE / 4;
            warp.m[m_tile][half_idx] = NO_KEY;
            warp.scale[m_tile][half_idx] = logits.scale;
            if constexpr (Cta::FP8) {
                warp.scale[m_tile][half_idx] *= smem.q_factor[q_buffer][row];
            }
        }
        const int32_t steps = Cta::num_steps(item);
#pragma unroll 1
        for (int32_t step = (warp_idx - first_warp) & (WARPS - 1); step < steps; step += WARPS) {
            cp_async_wait_group<STAGES - 1>();
            __syncwarp();  // the other lanes' copies have landed too
            const char* buffer = smem.ring[warp_idx][stage];
            typename Cta::Scores s = {};
            Cta::multiply_keys(s, fragments, smem, q_buffer, buffer);
            Cta::mask_and_scale(
                s,
                warp,
                p,
                logits,
                sight,
                item.first_token + step * TOKENS,
                smem.keys[warp_idx][stage]);
            Cta::weigh(s, warp);
            Cta::multiply_values(warp.o, s, buffer);
            __syncwarp();  // the buffer has been read
            loader.issue(stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }

        // 4 one state of all warps
        __syncthreads();  // the states of the item before have been read
        Cta::store_warp(smem, warp);
        if (has_next) {
            queries.store(p, smem, q_buffer ^ 1);
        }
        __syncthreads();  // states and queries are there
        const bool whole = item.first_slot < 0;
        bool finishes = whole;
        if (!whole && item.num_rows > 0) {
            Cta::each_vector(p, item, [&](int row, int feat) {
                const auto state = Cta::merge_warps(smem, row, feat, first_warp);
                const int32_t slot = item.slot(item.item_idx);
                Cta::store_slot(p, state, Cta::slot_row(p, slot, kv_head, row), feat);
            });
            finishes = Cta::takes_last_ticket(p, smem, item, kv_head);
        }

        // 5 the result, of these warps or of all items of the tile
        if (finishes) {
            Cta::each_vector(p, item, [&](int row, int feat) {
                auto state = whole ? Cta::merge_warps(smem, row, feat, first_warp)
                                   : Cta::merge_slots(p, item, kv_head, row, feat);
                Cta::finish(p, state, item, kv_head, row, feat);
            });
        }
        first_warp = (first_warp + steps) & (WARPS - 1);
        if (has_next) {
            item = p.work.items[item_idx + 1];
        }
    }
}

}  // namespace cukv
