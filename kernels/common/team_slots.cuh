// Slots (common/slots.cuh) of tiles whose rows are shared out to teams of a warpgroup each.
//
// A team merges its own rows, with a half of the tile's ticket of its own. Its sums lie in a slot
// as its threads hold them, vector by vector.
#pragma once
#include "common/ptx_sm90.cuh"
#include "common/slots.cuh"

namespace cukv {

template <int ROWS, int HEAD_DIM>
struct TeamSlots {
    static constexpr int TEAM_ROWS = 64, THREADS = 128;
    static constexpr int VECS = TEAM_ROWS * HEAD_DIM / 4 / THREADS;  // of a thread
    static constexpr int IN_FLIGHT = 8;                              // that are loaded together
    // Whose sums are made together: beside more of them others' registers would be spilled.
    static constexpr int AT_ONCE = VECS > 16 ? IN_FLIGHT : VECS;

    const WorkList& work;
    const Item& item;
    int kv_head;
    int team;
    int row;  // of the tile, the first of this lane's two; the other is 8 below

    __device__ __forceinline__ int64_t slot(int32_t i) const {
        return int64_t{item.slot(i)} * work.num_kv_heads + kv_head;
    }

    __device__ __forceinline__ float4* sums(int32_t i) const {
        float* team_sums = work.sums + (slot(i) * ROWS + team * TEAM_ROWS) * HEAD_DIM;
        return reinterpret_cast<float4*>(team_sums) + threadIdx.x % THREADS;
    }

    __device__ __forceinline__ float2* state(int32_t i, int half_idx) const {
        return reinterpret_cast<float2*>(work.states) + slot(i) * ROWS + row + 8 * half_idx;
    }

    // Stores sums, and maximum and denominator of whole rows.
    __device__ __forceinline__ void store(
        const float (&o)[VECS][4], const float (&m)[2], const float (&d)[2]) const {
        float4* to = sums(item.item_idx);
#pragma unroll
        for (int i = 0; i < VECS; ++i) {
            to[i * THREADS] = make_float4(o[i][0], o[i][1], o[i][2], o[i][3]);
        }
        if (threadIdx.x % 4 == 0) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                *state(item.item_idx, h) = make_float2(m[h], d[h]);
            }
        }
    }

    // Whether this team is the last of the tile's for its rows: then all their slots are written.
    // `last` is the team's in shared memory.
    __device__ __forceinline__ bool takes_last_ticket(int32_t& last) const {
        bar_sync(1 + team, THREADS);  // the slot is written; the first thread publishes it for all
        if (threadIdx.x % THREADS == 0) {
            int32_t* ticket = work.tickets + int64_t{item.first_slot} * work.num_kv_heads + kv_head;
            const int shift = 16 * team;
            const int32_t before = atom_add_acq_rel(ticket, 1 << shift);
            last = (before >> shift & 0xffff) == item.num_items - 1;
            if (last) {  // for the next launch
                atom_add_acq_rel(ticket, static_cast<int32_t>(-uint32_t(item.num_items) << shift));
            }
        }
        bar_sync(1 + team, THREADS);  // `last` is there
        return last;
    }

    // Merges the slots of all items in the order of their keys.
    __device__ __forceinline__ void merge(float (&o)[VECS][4], float (&m)[2], float (&d)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            m[h] = NO_KEY;
            for (int32_t i = 0; i < item.num_items; ++i) {
                m[h] = fmaxf(m[h], __ldcg(state(i, h)).x);
            }
        }
#pragma unroll
        for (int first = 0; first < VECS; first += AT_ONCE) {
            merge_sums(reinterpret_cast<float (&)[AT_ONCE][4]>(o[first]), first, m, d);
        }
    }

    // Vectors [first, first + AT_ONCE), and the denominator, relative to the maximum m.
    __device__ __forceinline__ void merge_sums(
        float (&o)[AT_ONCE][4], int first_vec, const float (&m)[2], float (&d)[2]) const {
#pragma unroll
        for (int i = 0; i < AT_ONCE * 4; ++i) {
            o[i / 4][i % 4] = 0.0f;
        }
        d[0] = d[1] = 0.0f;
#pragma unroll 1
        for (int32_t i = 0; i < item.num_items; ++i) {
            float weight[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 md = __ldcg(state(i, h));
                weight[h] = ex2(md.x - (m[h] > NO_KEY ? m[h] : 0.0f));
                d[h] = fmaf(weight[h], md.y, d[h]);
            }
            const float4* from = sums(i) + first_vec * THREADS;
#pragma unroll
            for (int first = 0; first < AT_ONCE; first += IN_FLIGHT) {
                float4 x[IN_FLIGHT];
#pragma unroll
                for (int j = 0; j < IN_FLIGHT; ++j) {
                    x[j] = __ldcg(from + (first + j) * THREADS);
                }
#pragma unroll
                for (int j = 0; j < IN_FLIGHT; ++j) {
                    float (&sum)[4] = o[first + j];
                    sum[0] = fmaf(weight[0], x[j].x, sum[0]);
                    sum[1] = fmaf(weight[0], x[j].y, sum[1]);
                    sum[2] = fmaf(weight[1], x[j].z, sum[2]);
                    sum[3] = fmaf(weight[1], x[j].w, sum[3]);
                }
            }
        }
    }
};

}  // namespace cukv
