// What a launch of attention over pages is given, by whichever kernel.
#pragma once
#include "common/queries.cuh"

namespace cukv {

struct AttentionParams {
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

}  // namespace cukv
