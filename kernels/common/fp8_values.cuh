// Warps that have values of e4m3 copied, and lay them out as a product reads them: such products
// take rows along the sum only, so features become the rows, and keys the columns.
//
//   byte 16 * i + 4 * t + j of row 16 * c + 8 * e + g of a step's tile
//     = feature 16 * c + 2 * g + e of key 16 * i + 2 * t + j % 2 + 8 * (j / 2) of the step
//
// ldmatrix moves 16-bit units, of which transposing leaves two features to a lane; a permutation of
// bytes takes them apart. Keys come in the order in which a lane holds their weights, as scores of
// the product before; features in the order of common/operands.cuh, where `neighbours` puts sums
// right: no two rows that stmatrix stores together share banks.
//
// One warp would take longer for a step than its products do: four share it, by features, and wait
// for copies and teams alone. Cta: as for common/kv_server.cuh, and FEATURES of a value, COPIES;
// Smem with `copies` too.
#pragma once
#include "common/kv_server.cuh"

namespace cukv {

constexpr int FP8_VALUE_WARPS = 4;  // lay out a step

// A step's tile of KEYS values as copied, and as laid out.
template <int KEYS, int FEATURES>
struct Fp8ValueTile {
    using Copied = OperandTile<KEYS, FEATURES / 2, false>;  // of columns of 16 bits
    using Values = OperandTile<FEATURES, KEYS / 2, false>;

    static_assert(KEYS % 32 == 0, "a warp's ldmatrix has a key a lane");
    static_assert(FEATURES % (16 * FP8_VALUE_WARPS) == 0, "warps share features evenly");
    static constexpr int LOADS = KEYS / 32;                         // of 16 features of all keys
    static constexpr int CHUNKS = FEATURES / 16 / FP8_VALUE_WARPS;  // of 16 features, of a warp

    // Lays out a warp's share of a tile. Keys from num_keys on may hold NaN, which a weight of 0
    // does not hide: they become zeros.
    static __device__ __forceinline__ void transpose(
        char* copied, char* values, int warp, int num_keys) {
        const int lane_idx = threadIdx.x % WARP_SIZE;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int chunk = warp * CHUNKS + c;
            for (int key = num_keys + lane_idx; key < KEYS; key += WARP_SIZE) {
                *reinterpret_cast<uint4*>(copied + Copied::offset(key, chunk)) = uint4{};
            }
        }
        __syncwarp();
        const uint32_t from = smem_address(copied) + Copied::offset(lane_idx, warp * CHUNKS);
        const uint32_t to = smem_address(values) + warp * CHUNKS * 2 * Values::GROUP_BYTES +
                            Values::offset(lane_idx % 16, lane_idx / 16);
        // All loads of a chunk are on their way before the first store.
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            uint32_t x[LOADS][4];
#pragma unroll
            for (int n = 0; n < LOADS; ++n) {
                ldmatrix_x4_trans(x[n], chunks_on(from, c) + n * 4 * Copied::GROUP_BYTES);
            }
#pragma unroll
            for (int n = 0; n < LOADS; ++n) {
                uint32_t y[4];
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    y[i] = __byte_perm(x[n][i], x[n][i + 1], 0x6420);
                    y[i + 1] = __byte_perm(x[n][i], x[n][i + 1], 0x7531);
                }
                stmatrix_x4(chunks_on(to, 2 * n) + c * 2 * Values::GROUP_BYTES, y);
            }
        }
    }
};

// Steps as they were copied, in shared memory.
template <int STAGES, typename Copied>
struct Fp8Copies {
    static constexpr int NO_STEP = -1;

    alignas(1024) char tiles[STAGES][Copied::BYTES];
    uint64_t full[STAGES], empty[STAGES];
    int32_t num_keys[STAGES];  // of the item in the step; NO_STEP behind the last item

    __device__ __forceinline__ void set_up() {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full[stage], 1);
            mbarrier_init(empty[stage], FP8_VALUE_WARPS);
        }
    }
};

// Of values that products take as they were copied.
struct NoCopies {
    __device__ __forceinline__ void set_up() {}
};

// Has values copied, step by step. By a warp.
template <typename Cta, typename Params>
__device__ __forceinline__ void copy_fp8_values(const Params& p, typename Cta::Smem& smem) {
    using Copied = typename Fp8ValueTile<Cta::TOKENS, Cta::FEATURES>::Copied;
    const StepCopy<Copied, Cta::TOKENS, Cta::PAGED> copy{
        p.table, p.v_cache, p.v_map, p.v_head_spans, p.piece_bits};
    auto& copies = smem.copies;
    const bool leads = threadIdx.x % WARP_SIZE == 0;
    RingPlace<Cta::COPIES> at;
    ItemReader<Cta> items(smem);
    each_step<Cta>(p, items, [&](const Item& item, int32_t kv_head, const auto& step) {
        const auto piece = copy.find(item, step);
        mbarrier_try_wait(copies.empty[at.stage], at.parity ^ 1);
        if (leads) {
            copies.num_keys[at.stage] = max(step.num_keys, 0);
        }
        copy.issue(
            copies.tiles[at.stage], copies.full[at.stage], item, kv_head, step.position, piece);
        at.next();
    });
    mbarrier_try_wait(copies.empty[at.stage], at.parity ^ 1);
    if (leads) {
        copies.num_keys[at.stage] = copies.NO_STEP;
        mbarrier_arrive(copies.full[at.stage]);
    }
}

// Lays values out, step by step. By FP8_VALUE_WARPS warps, of which this is number `warp`.
template <typename Cta>
__device__ __forceinline__ void lay_out_fp8_values(typename Cta::Smem& smem, int warp) {
    auto& copies = smem.copies;
    RingPlace<Cta::COPIES> from;
    RingPlace<Cta::V_STAGES> to;
    while (true) {
        mbarrier_try_wait(copies.full[from.stage], from.parity);
        const int num_keys = copies.num_keys[from.stage];
        if (num_keys < 0) {
            return;
        }
        mbarrier_try_wait(smem.v_empty[to.stage], to.parity ^ 1);
        Fp8ValueTile<Cta::TOKENS, Cta::FEATURES>::transpose(
            copies.tiles[from.stage], smem.v[to.stage], warp, num_keys);
        fence_proxy_async();
        __syncwarp();  // all lanes have read the copy, and written its values
        if (threadIdx.x % WARP_SIZE == 0) {
            mbarrier_arrive(copies.empty[from.stage]);
            mbarrier_arrive(smem.v_full[to.stage]);
        }
        from.next();
        to.next();
    }
}

}  // namespace cukv
