// What a launch of attention over pages is given, by whichever kernel.
#pragma once
#include "common/levels.cuh"

namespace cukv {

struct AttentionParams {
    PageTable table;            // of it the page ids: lengths are the work list's
    const char* q;              // [rows, num_qo_heads, head_dim]
    char* o;                    // [rows, num_qo_heads, head_dim_vo]
    char* lse;                  // [rows, num_qo_heads] float32, base 2, or null
    const char* sinks;          // [num_qo_heads], or null
    const int32_t* first_seen;  // [rows], see common/window.cuh, or null
    Levels levels;
    WorkList work;
    Scale q_scale;
    Scale k_scale;
    Scale v_scale;
    int32_t inputs_ready;  // 1: the launch before this one writes nothing that this one reads, but
                           // what levels leave, and lets it in when all before that have ended
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
};

// The parameters of a plain call. It has no options, rows of the cache's own dtype that are moved
// in whole vectors, and heads as wide as the tile: what says so are constants then.
template <typename KV, int HEAD_DIM_QK, int HEAD_DIM_VO>
__device__ __forceinline__ AttentionParams plain_params(AttentionParams p) {
    p.sinks = nullptr;
    p.logits_soft_cap = 0.0f;
    p.window_left = -1;
    p.work.mask.entries = nullptr;
    p.q_rows.kind = p.o_rows.kind = KIND_OF<KV>;
    p.q_rows.aligned = p.o_rows.aligned = 1;
    p.head_dim = HEAD_DIM_QK;
    p.head_dim_vo = HEAD_DIM_VO;
    return p;
}

}  // namespace cukv
