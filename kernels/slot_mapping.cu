// slot_mapping -- the flat slot of every (request, position) pair.
//
//   page    = indices[indptr[b] + positions[i] / page_size],  b = batch_indices[i]
//   slot[i] = page * page_size + positions[i] % page_size,    -1 where the pair names no slot
//
// One thread per pair. Bound by launch.
// Host: cukv/page_table.py PageTable.slot_mapping       Reference: cukv/reference.py slot_mapping
#include "common/paged.cuh"

namespace cukv {

struct SlotMappingParams {
    PageTable table;
    Index batch_indices;  // [n], negative = no request
    Index positions;      // [n], tokens
    Index slots;          // [n], written
};

static_assert(
    sizeof(SlotMappingParams) == PARAMS_BYTES, "host and device disagree on the parameters");

__global__ void slot_mapping(const __grid_constant__ SlotMappingParams p) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= p.slots.size) {
        return;
    }
    const int64_t request_idx = p.batch_indices[i], position = p.positions[i];
    int64_t slot = -1;
    if (request_idx >= 0 && request_idx < p.table.batch_size) {
        const Slot place = p.table.slot(p.table.request(request_idx), position);
        slot = place.page >= 0 ? place.page * p.table.page_size + place.entry : -1;
    }
    p.slots.store(i, slot);
}

}  // namespace cukv
