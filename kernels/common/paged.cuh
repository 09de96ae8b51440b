// Pages and the CSR page table: one addressing for both layouts and both storage forms.
//
//   element(page, entry, head, feat) = base + page * page_stride + entry * token_stride
//                                           + head * head_stride + feat        (bytes, 64 bit)
#pragma once
#include "common/index.cuh"

namespace cukv {

// Where one token of one request lives; page is -1 where there is no such place.
struct Slot {
    int64_t page;
    int64_t entry;  // token within its page
};

constexpr int64_t NO_SLOT = -0x7fffffffffffffffLL - 1;  // an offset that no slot has

// One storage array: K or V of a paged cache, ckv or kpe of an MLA cache.
struct Pages {
    char* base;            // of page 0
    int64_t page_stride;   // bytes
    int64_t token_stride;  // bytes
    int64_t head_stride;   // bytes
    int64_t max_num_pages;

    __device__ __forceinline__ bool has(int64_t page) const {
        return page >= 0 && page < max_num_pages;
    }

    // The first element of a head of a slot, whose page exists.
    __device__ __forceinline__ const char* row(const Slot& slot, int head) const {
        return base + slot.page * page_stride + slot.entry * token_stride + head * head_stride;
    }

    // Whether tokens of a page, all heads of row_bytes each, are one run of bytes.
    __device__ __forceinline__ bool has_runs(int num_heads, int row_bytes) const {
        return head_stride == row_bytes && token_stride == int64_t{num_heads} * row_bytes;
    }

    // Bytes from base to a slot's first element; NO_SLOT where there is no such place.
    __device__ __forceinline__ int64_t offset(const Slot& slot) const {
        return has(slot.page) ? slot.page * page_stride + slot.entry * token_stride : NO_SLOT;
    }
};

// What the table says of one request.
struct Request {
    int64_t first_page;  // its pages are indices[first_page], ..., indices[end_page - 1]
    int64_t end_page;
    int64_t last_page_len;  // tokens
};

struct PageTable {
    Index indptr;   // [batch_size + 1], counts pages
    Index indices;  // [indptr[-1]] or longer, page ids; for attention also not given: 0, 1, ...
    Index last_page_len;  // [batch_size], tokens; for attention also not given: full pages
    int64_t batch_size;
    int64_t page_size;
    Divisor page_divisor;  // by page_size

    __device__ __forceinline__ Request request(int64_t request_idx) const {
        return {indptr[request_idx], indptr[request_idx + 1], last_page_len[request_idx]};
    }

    __device__ __forceinline__ int64_t kv_len(const Request& r) const {
        const int64_t num_pages = r.end_page - r.first_page;
        return num_pages > 0 ? (num_pages - 1) * page_size + r.last_page_len : 0;
    }

    // Any contents are safe: reads stay inside `indices`, and what lies outside is no page.
    __device__ __forceinline__ int64_t page_id(const Request& r, int64_t page_idx) const {
        if (r.first_page < 0 || r.first_page >= indices.size) {
            return -1;
        }
        const int64_t i = r.first_page + page_idx;
        return i < r.end_page && i < indices.size ? indices[i] : -1;
    }

    // Positions are below 2^31, more than any real length, so that one multiplication divides them.
    __device__ __forceinline__ Slot slot(const Request& r, int64_t position) const {
        if (position < 0 || position > 0x7fffffff) {
            return {-1, 0};
        }
        const uint32_t token = static_cast<uint32_t>(position);
        const uint32_t page_idx = page_divisor.quotient(token);
        return {page_id(r, page_idx), token - page_idx * page_divisor.divisor};
    }
};

}  // namespace cukv
