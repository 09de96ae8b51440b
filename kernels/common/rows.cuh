// Rows moved between a packed token axis and pages: who moves what, and conversion on the way.
//
// A CTA owns rows_per_cta rows of one array and moves them as one run of vectors, VEC elements of
// one head each: thread t moves vectors t, t + num_threads, ... So a CTA is full whatever the
// width of a row, and the widest and the narrowest rows (a head of 8 elements, 128 heads of 256)
// take the same path.
#pragma once
#include "common/paged.cuh"

namespace cukv {

constexpr int MAX_ROWS_PER_CTA = 256;

// How packed rows [nnz, num_heads, head_dim], which append reads and gather writes, lie and are
// dealt to CTAs; their address is a parameter of its own. Where the heads of rows and pages are
// both contiguous, the host passes one head of all their elements.
struct Rows {
    int64_t row_stride;        // bytes
    int64_t head_stride;       // bytes
    Divisor columns;           // vectors of a row
    Divisor columns_per_head;  // vectors of a head
    int32_t rows_per_cta;
};

// The rows [first, first + num) of the cta_idx-th CTA of an array.
struct RowRange {
    int64_t first;
    int num;

    __device__ __forceinline__ RowRange(int64_t nnz, const Rows& rows, int64_t cta_idx)
        : first(cta_idx * rows.rows_per_cta),
          num(static_cast<int>(min(int64_t{rows.rows_per_cta}, nnz - first))) {}
};

// Where one vector lies within the CTA's rows.
struct Place {
    int local_row;
    int head;
    int vec;  // within the head

    __device__ __forceinline__ Place(const Rows& rows, uint32_t vec_idx) {
        local_row = rows.columns.quotient(vec_idx);
        const uint32_t column = vec_idx - local_row * rows.columns.divisor;
        head = rows.columns_per_head.quotient(column);
        vec = column - head * rows.columns_per_head.divisor;
    }

    // Bytes from the first element of a row or slot.
    template <typename DType, int VEC>
    __device__ __forceinline__ int64_t offset(int64_t head_stride) const {
        return head * head_stride + vec * int64_t{VEC * sizeof(DType)};
    }
};

// Moves the CTA's rows: value = load(place), then store(place, value), with the next load on its
// way before a store. More of them are slower, not faster: they spread the SMs over more DRAM pages
// than stay open.
template <typename Value, typename Load, typename Store>
__device__ __forceinline__ void move_rows(const Rows& rows, int num_rows, Load load, Store store) {
    const uint32_t num_vecs = num_rows * rows.columns.divisor;
    uint32_t vec_idx = threadIdx.x;
    Value now, next;
    if (vec_idx < num_vecs) {
        now = load(Place(rows, vec_idx));
    }
#pragma unroll 1
    while (vec_idx < num_vecs) {
        const uint32_t next_idx = vec_idx + blockDim.x;
        if (next_idx < num_vecs) {
            next = load(Place(rows, next_idx));
        }
        store(Place(rows, vec_idx), now);
        now = next;
        vec_idx = next_idx;
    }
}

// Converts with `scale` applied to the float that each element passes through; equal types are
// bits.
template <typename FROM, typename TO, int VEC, typename Scaling>
__device__ __forceinline__ Vec<TO, VEC> convert(const Vec<FROM, VEC>& x, Scaling scale) {
    if constexpr (is_same<FROM, TO>) {
        return x;
    } else {
        Vec<TO, VEC> y;
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            y[i] = from_float<TO>(scale(to_float(x[i])));
        }
        return y;
    }
}

}  // namespace cukv
