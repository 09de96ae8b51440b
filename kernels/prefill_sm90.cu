// prefill_sm90 -- attend from tiles of 128 packed query rows to keys, on sm_90a.
//
//   s[r, j] = sm_scale * q[r] . k[j] (soft-capped), for the keys j of the item that row r sees
//   o[r] = sum_j softmax(s[r])[j] * v[j],  lse[r] = log2(sum_j 2^(s[r, j] * log2(e)))
//
// The query heads of a KV head, times the query rows of a request, are the rows of a tile. A CTA
// has two teams of a warpgroup and 64 rows each, and warps that serve them:
//
//   warp 0  copies keys, a step of TOKENS at a time          warp 1    copies values
//   warps 2, 3  bring a team's queries and take its results  warps 4-7, 8-11  teams 0, 1
//   warps 12-15  of e4m3 alone: lay values out as products read them
//
// MAPPED: keys and values are copied by tensor maps, whole steps or pieces of pages at a time; else
// by the lanes of warps 0 and 1, token by token (common/token_server.cuh): pages of any size, at
// strides that no map describes.
//
// Teams never pause between items: the first scores of an item are computed together with the last
// sums of the one before, whose results go out through the memory of its queries. Under a custom
// mask a step is an entry of the tile (common/mask.cuh), or half of one: its class comes with its
// keys, and teams read its bits if it is mixed. Bound by tensor cores: 2 * (head_dim + head_dim_vo)
// operations per row and key.
//
// Queries, keys and values of e4m3 are multiplied as they are, and so are softmax weights rounded
// to it (common/fp8_team.cuh): without a soft cap and masks, by maps. Such products take half the
// time, about as long as the exponentials. They want values in another order than a map's, which
// warps 12-15 make of what warp 1 has copied (common/fp8_values.cuh).
// Host: cukv/paged.py PagedKVCache.prefill, cukv/ragged.py RaggedTensor.prefill
// Reference: cukv/reference.py prefill
#include "common/attention.cuh"
#include "common/fp8_team.cuh"
#include "common/fp8_values.cuh"
#include "common/kv_server.cuh"
#include "common/row_server.cuh"
#include "common/team.cuh"
#include "common/token_server.cuh"

namespace cukv {

struct PrefillSm90Params : AttentionParams {
    TensorMap q_map;
    TensorMap o_map;
    TensorMap k_map;
    TensorMap v_map;
    int32_t q_mapped;  // 1: there is a map of q
    int32_t o_mapped;
    int32_t k_head_spans;  // from a head to the next, in units of 128 bytes
    int32_t v_head_spans;
    int32_t piece_bits;     // log2 of the tokens of a page that one copy brings
    int32_t heads_at_once;  // KV heads that are worked on at a time
};

static_assert(
    sizeof(PrefillSm90Params) == PARAMS_BYTES, "host and device disagree on the parameters");

// Two warpgroups that compute and one that serves them; of fp8, one that lays values out.
template <typename KV>
constexpr int prefill_sm90_threads = is_fp8<KV> ? 512 : 384;

// Geometry of one specialisation, and its shared memory.
template <
    typename KV,
    int HEAD_DIM_QK,
    int HEAD_DIM_VO,
    int TOKENS_,
    int SLOTS_,
    int K_STAGES_,
    int V_STAGES_,
    bool PAGED_,
    bool MASKED_,
    bool MAPPED_>
struct PrefillSm90Cta {
    static constexpr bool FP8 = is_fp8<KV>;
    static constexpr int TOKENS = TOKENS_, K_STAGES = K_STAGES_, V_STAGES = V_STAGES_;
    static constexpr int SLOTS = SLOTS_;  // items whose queries or results are here
    static constexpr int DEALT = 4;       // items that were dealt and not yet begun by all
    static constexpr bool PAGED = PAGED_;
    static constexpr bool MASKED = MASKED_;  // the work list has a mask
    static constexpr bool MAPPED = MAPPED_;  // keys come by tensor maps; else token by token
    static_assert(PAGED || MAPPED, "tokens are those of pages");
    static_assert(MAPPED || !FP8, "values of fp8 are copied by maps before they are laid out");
    static constexpr int TEAMS = 2, TEAM_ROWS = 64, TEAM_THREADS = 128, ROWS = TEAMS * TEAM_ROWS;
    static constexpr int THREADS = prefill_sm90_threads<KV>;
    // 128 * (56 + 2 * 224) = 64512 registers, all that a CTA of 384 threads has; of fp8
    // 128 * (64 + 2 * 208 + 32) = 65536, those of 512.
    static constexpr int SERVER_REGISTERS = FP8 ? 64 : HEAD_DIM_VO > 64 ? 56 : 88;
    static constexpr int TEAM_REGISTERS = FP8 ? 208 : HEAD_DIM_VO > 64 ? 224 : 208;
    static constexpr int LAYOUT_REGISTERS = 32;
    static constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;  // of each thread, at first
    static_assert(
        SERVER_REGISTERS + TEAMS * TEAM_REGISTERS + (FP8 ? LAYOUT_REGISTERS : 0) <=
            THREADS / TEAM_THREADS * LAUNCH_REGISTERS,
        "warpgroups share out what registers a launch has given all");
    static_assert(HEAD_DIM_VO <= HEAD_DIM_QK, "results take the place of queries");
    // How many say that a step's keys or values are there: one who has them copied by a map; the
    // copies of each lane, and of keys one that tells which are dropped; those who lay values out.
    static constexpr int KEY_ARRIVALS = MAPPED ? 1 : WARP_SIZE + 1;
    static constexpr int VALUE_ARRIVALS = FP8 ? FP8_VALUE_WARPS : MAPPED ? 1 : WARP_SIZE;

    // Two elements of 8 bits are a column of 16.
    static constexpr int COLUMNS_QK = HEAD_DIM_QK * sizeof(KV) / 2;
    using Queries = OperandTile<TEAM_ROWS, COLUMNS_QK, false>;
    using Results = OperandTile<TEAM_ROWS, HEAD_DIM_VO, false>;
    using Keys = OperandTile<TOKENS, COLUMNS_QK, PAGED>;
    using Values = typename Select<
        FP8,
        typename Fp8ValueTile<TOKENS, HEAD_DIM_VO>::Values,
        OperandTile<TOKENS, HEAD_DIM_VO, PAGED>>::type;
    using State = typename Select<
        FP8,
        Fp8State<TOKENS, HEAD_DIM_VO>,
        WarpgroupState<KV, TOKENS, HEAD_DIM_VO>>::type;

    // Of fp8, values as they are copied, which are laid out anew for products.
    static constexpr int FEATURES = HEAD_DIM_VO, COPIES = 2;
    using Copies = typename Select<
        FP8,
        Fp8Copies<COPIES, typename Fp8ValueTile<TOKENS, FEATURES>::Copied>,
        NoCopies>::type;

    // What a team is given with its queries; an item without rows ends its work.
    struct alignas(16) Order {
        Item item;
        int32_t kv_head;
        int32_t results;  // from the team: whether they lie where its queries were
    };

    struct Smem {
        alignas(1024) char q[SLOTS][TEAMS][TEAM_ROWS * HEAD_DIM_QK * 2];  // or results
        char k[K_STAGES][Keys::BYTES];
        char v[V_STAGES][Values::BYTES];
        Order orders[SLOTS][TEAMS], dealt[DEALT];
        uint64_t dealt_full[DEALT], dealt_empty[DEALT];
        uint64_t q_full[SLOTS][TEAMS], o_full[SLOTS][TEAMS];
        uint64_t k_full[K_STAGES], k_empty[K_STAGES], v_full[V_STAGES], v_empty[V_STAGES];
        uint64_t v_landed;  // values whose last rows are still to be zeroed
        uint32_t k_dropped[K_STAGES][DroppedKeys<MAPPED>::WORDS];
        int32_t k_entry[K_STAGES];  // of a step, the mask's
        int32_t last[TEAMS];        // whether the team has the last ticket
        float unread[TEAMS * 4];    // of each warp
        Copies copies;
    };

    static __device__ __forceinline__ void set_up(Smem& smem) {
        for (int i = 0; i < SLOTS * TEAMS; ++i) {
            mbarrier_init(smem.q_full[i / TEAMS][i % TEAMS], 1);
            mbarrier_init(smem.o_full[i / TEAMS][i % TEAMS], TEAM_THREADS);
        }
        for (int stage = 0; stage < K_STAGES; ++stage) {
            mbarrier_init(smem.k_full[stage], KEY_ARRIVALS);
            mbarrier_init(smem.k_empty[stage], TEAMS * 4);  // one lane of each warp
        }
        for (int stage = 0; stage < V_STAGES; ++stage) {
            mbarrier_init(smem.v_full[stage], VALUE_ARRIVALS);
            mbarrier_init(smem.v_empty[stage], TEAMS * 4);
        }
        for (int i = 0; i < DEALT; ++i) {
            mbarrier_init(smem.dealt_full[i], 1);
            mbarrier_init(smem.dealt_empty[i], 1 + TEAMS);  // who copies values, who serves teams
        }
        mbarrier_init(smem.v_landed, 1);
        smem.copies.set_up();
        fence_mbarrier_init();
    }

    static __device__ __forceinline__ int own_rows(const Item& item, int team) {
        return min(max(item.num_rows - team * TEAM_ROWS, 0), TEAM_ROWS);
    }
};

template <
    typename KV,
    int HEAD_DIM_QK,
    int HEAD_DIM_VO,
    int TOKENS,
    int SLOTS,
    int K_STAGES,
    int V_STAGES,
    bool PAGED,
    bool SOFT_CAP,
    bool MASKED,
    bool MAPPED>
__global__ void __launch_bounds__(prefill_sm90_threads<KV>, 1)
    prefill_sm90(const __grid_constant__ PrefillSm90Params p) {
    using Cta = PrefillSm90Cta<
        KV, HEAD_DIM_QK, HEAD_DIM_VO, TOKENS, SLOTS, K_STAGES, V_STAGES, PAGED, MASKED, MAPPED>;
    extern __shared__ __align__(1024) char smem_bytes[];
    auto& smem = *reinterpret_cast<typename Cta::Smem*>(smem_bytes);
    // The same in all lanes, which the compiler is told: descriptors then take no lane's registers.
    const int warp_idx = __shfl_sync(0xffffffffu, threadIdx.x / WARP_SIZE, 0);

    // 1 barriers; a launch behind this one may take what SMs this one leaves
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        Cta::set_up(smem);
    }
    __syncthreads();

    // 2 each warp its task
    if constexpr (Cta::FP8) {
        if (warp_idx >= 12) {
            setmaxnreg_dec<Cta::LAYOUT_REGISTERS>();
            lay_out_fp8_values<Cta>(smem, warp_idx - 12);
            return;
        }
    }
    if (warp_idx < 4) {
        setmaxnreg_dec<Cta::SERVER_REGISTERS>();
        if (warp_idx == 0) {
            if constexpr (MAPPED) {
                serve_keys<Cta>(p, smem);
            } else {
                serve_key_tokens<Cta>(p, smem);
            }
        } else if (warp_idx == 1) {
            if constexpr (Cta::FP8) {
                copy_fp8_values<Cta>(p, smem);
            } else if constexpr (MAPPED) {
                serve_values<Cta>(p, smem);
            } else {
                serve_value_tokens<Cta>(p, smem);
            }
        } else {
            RowServer<Cta, PrefillSm90Params>{p, smem, warp_idx - 2}.serve();
        }
    } else {
        setmaxnreg_inc<Cta::TEAM_REGISTERS>();
        if constexpr (Cta::FP8) {
            static_assert(!SOFT_CAP && !MASKED, "teams of fp8 have neither");
            Fp8Team<KV, Cta, PrefillSm90Params>(p, smem, warp_idx).attend();
        } else {
            Team<KV, Cta, SOFT_CAP, PrefillSm90Params>(p, smem, warp_idx).attend();
        }
    }
}

}  // namespace cukv
