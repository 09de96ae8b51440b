// merge_states -- combine the attention states of k disjoint sets of keys, per row and head.
//
//   m = max_j lse[j],  w[j] = 2^(lse[j] - m),  d = sum_j w[j]
//   o = sum_j w[j] * o[j] / d,  lse = m + log2(d)       without a live state: o = 0, lse = -inf
//
// A team of lanes of one warp per row and head, in vectors of 16 bytes of the wider dtype. A state
// is live if its lse is above -inf; what the others' o holds never matters. The result may be
// written over a state: a lane has read its vectors, a team its head's lse, before it writes them.
// Bound by HBM: every state read once, the result written once.
// Host: cukv/merge.py merge_states, merge_state       Reference: cukv/reference.py merge_states
#include "common/softmax.cuh"

namespace cukv {

// Loads of o per lane before the first is used: vectors of a state, times states. Two vectors share
// the arithmetic of addresses and weights.
constexpr int VECS_PER_LANE = 2;
constexpr int STATES_IN_FLIGHT = 4;

// States [num_rows, num_heads, head_dim] and [num_rows, num_heads]; all strides in bytes.
struct States {
    char* o;
    char* lse;  // float32, base 2
    int64_t o_row_stride;
    int64_t o_head_stride;
    int64_t o_state_stride;
    int64_t lse_row_stride;
    int64_t lse_head_stride;
    int64_t lse_state_stride;

    __device__ __forceinline__ char* o_of(int64_t row, uint32_t head) const {
        return o + row * o_row_stride + head * o_head_stride;
    }

    __device__ __forceinline__ char* lse_of(int64_t row, uint32_t head) const {
        return lse + row * lse_row_stride + head * lse_head_stride;
    }
};

struct MergeStatesParams {
    States out;
    States first;        // state 0
    States rest;         // states 1, 2, ..., k - 1
    uint64_t num_teams;  // num_rows * num_heads
    uint64_t num_heads;
    int32_t k;
    int32_t head_dim;
    int32_t team_bits;  // log2 of a team's lanes, up to 5
};

static_assert(
    sizeof(MergeStatesParams) == PARAMS_BYTES, "host and device disagree on the parameters");

// Walks over the states of a row and head; past the last it stays there, so that all loads can be
// issued without a branch.
struct Walk {
    const char* o;
    const char* lse;
    int64_t o_step;  // bytes to the next state
    int64_t lse_step;

    __device__ __forceinline__ Walk(const MergeStatesParams& p, int64_t row, uint32_t head) {
        o = p.first.o_of(row, head);
        lse = p.first.lse_of(row, head);
        o_step = p.rest.o_of(row, head) - o;
        lse_step = p.rest.lse_of(row, head) - lse;
    }

    // From state j to the next.
    __device__ __forceinline__ void next(const MergeStatesParams& p, int32_t j) {
        o += j + 1 < p.k ? o_step : 0;
        lse += j + 1 < p.k ? lse_step : 0;
        o_step = p.rest.o_state_stride;
        lse_step = p.rest.lse_state_stride;
    }
};

// Replaces a vector by -0.0 unless `live`, word by word.
template <typename DType, int SIZE>
__device__ __forceinline__ void keep_if(bool live, Vec<DType, SIZE>& x) {
    constexpr uint32_t NEGATIVE_ZEROS = sizeof(DType) == 2 ? 0x80008000u : 0x80000000u;
    using Word = typename RawOf<(sizeof(x) < 4 ? sizeof(x) : 4)>::type;
    Word* words = reinterpret_cast<Word*>(&x.raw);
#pragma unroll
    for (int i = 0; i < sizeof(x) / sizeof(Word); ++i) {
        words[i] = live ? words[i] : static_cast<Word>(NEGATIVE_ZEROS);
    }
}

template <typename DType, int SIZE>
__device__ __forceinline__ float element(const Vec<DType, SIZE>& x, int i) {
    if constexpr (is_same<DType, bfloat16> && SIZE > 1) {  // the upper half of a float
        const uint32_t pair = reinterpret_cast<const uint32_t*>(&x.raw)[i / 2];
        return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    } else {
        return to_float(x[i]);
    }
}

// Merges all states of a row and head; the lane's vectors start at `offsets` bytes.
template <typename FROM, int VEC>
__device__ __forceinline__ State<VECS_PER_LANE, VEC> merge(
    const MergeStatesParams& p,
    int64_t row,
    int64_t head,
    const int32_t (&offsets)[VECS_PER_LANE]) {
    State<VECS_PER_LANE, VEC> state;
    Walk at(p, row, head);
    for (int32_t base = 0; base < p.k; base += STATES_IN_FLIGHT) {
        // 1 everything of these states is on its way
        float lse[STATES_IN_FLIGHT];
        Vec<FROM, VEC> x[STATES_IN_FLIGHT][VECS_PER_LANE];
#pragma unroll
        for (int i = 0; i < STATES_IN_FLIGHT; ++i) {
            lse[i] = __ldcs(reinterpret_cast<const float*>(at.lse));
#pragma unroll
            for (int vec = 0; vec < VECS_PER_LANE; ++vec) {
                x[i][vec] = load_vec_read_only<FROM, VEC>(at.o + offsets[vec]);
            }
            at.next(p, base + i);
        }
        // 2 their maximum, then their sum
        float m = state.m;
#pragma unroll
        for (int i = 0; i < STATES_IN_FLIGHT; ++i) {
            lse[i] = base + i < p.k ? lse[i] : NO_KEY;
            m = fmaxf(m, lse[i]);
        }
        state.raise(m);
#pragma unroll
        for (int i = 0; i < STATES_IN_FLIGHT; ++i) {
            float o[VECS_PER_LANE][VEC];
#pragma unroll
            for (int vec = 0; vec < VECS_PER_LANE; ++vec) {
                keep_if(lse[i] > NO_KEY, x[i][vec]);
#pragma unroll
                for (int e = 0; e < VEC; ++e) {
                    o[vec][e] = element(x[i][vec], e);
                }
            }
            state.add(lse[i], 1.0f, o);
        }
    }
    return state;
}

template <typename FROM, typename TO, int VEC>
__global__ void __launch_bounds__(128, 5)
    merge_states(const __grid_constant__ MergeStatesParams p) {
    // 1 which row and head; a team past the last merges that one again, and stores nothing
    const int32_t team_lanes = 1 << p.team_bits;
    const int32_t team_lane = threadIdx.x & (team_lanes - 1);
    const uint64_t team = (uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) >> p.team_bits;
    const bool owned = team < p.num_teams;
    const uint64_t row_head = owned ? team : p.num_teams - 1;
    const int64_t row = row_head / p.num_heads;
    const uint32_t head = row_head - row * p.num_heads;

    // 2 merge and store what the team covers at a time
    float lse = NO_KEY;
    for (int32_t base = 0; base < p.head_dim; base += team_lanes * VECS_PER_LANE * VEC) {
        int32_t feats[VECS_PER_LANE], offsets[VECS_PER_LANE];
#pragma unroll
        for (int vec = 0; vec < VECS_PER_LANE; ++vec) {
            feats[vec] = base + (vec * team_lanes + team_lane) * VEC;
            // past head_dim: any vector of the head, merged in vain
            offsets[vec] = feats[vec] < p.head_dim ? feats[vec] * int32_t{sizeof(FROM)} : 0;
        }
        const State<VECS_PER_LANE, VEC> state = merge<FROM, VEC>(p, row, head, offsets);
        lse = state.lse();
        char* out = p.out.o_of(row, head);
#pragma unroll
        for (int vec = 0; vec < VECS_PER_LANE; ++vec) {
            if (owned && feats[vec] < p.head_dim) {
                store_vec(out + feats[vec] * int64_t{sizeof(TO)}, state.template result<TO>(vec));
            }
        }
    }
    // 3 every lane of the team has read its head's lse: replace it
    __syncwarp();
    if (owned && team_lane == 0) {
        *reinterpret_cast<float*>(p.out.lse_of(row, head)) = lse;
    }
}

}  // namespace cukv
