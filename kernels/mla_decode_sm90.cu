// mla_decode_sm90 -- attend from many packed query rows to paged latent rows, on Hopper.
//
//   s[r, j] = sm_scale * (q_nope[r] . ckv[j] + q_pe[r] . kpe[j]), for the keys j that row r sees
//   o[r] = sum_j softmax(s[r])[j] * ckv[j],  lse[r] = log2(sum_j 2^(s[r, j] * log2(e)))
//
// The query heads of a block, times the query rows of a request, are the rows of a tile of 64. A
// CTA owns one block and one part of the work list. Warpgroup g of two scores the steps 2 i + g of
// an item, 64 keys each, and adds up columns [256 g, 256 (g + 1)) of all steps; four more warps
// load. Of two steps, 0 and 1,
//
//   warpgroup 0   scores 0 | weighs 0 | adds up left 0 | adds up left 1
//   warpgroup 1            | scores 1 | weighs 1       | adds up right 0, right 1
//
// where each gives its weights to the other through shared memory, and one's softmax runs beside
// the other's products.
// Bound by tensor cores: 2 * (2 * 512 + 64) operations per row and key.
// Host: cukv/mla.py MLAPagedCache.decode       Reference: cukv/reference.py mla_decode
#include "common/latent_warpgroup.cuh"

namespace cukv {

using MlaDecodeSm90Params = LatentMappedParams;

static_assert(
    sizeof(MlaDecodeSm90Params) == PARAMS_BYTES, "host and device disagree on the parameters");

template <typename CKV, typename KPE, bool MAPPED>
__global__ void __launch_bounds__(NUM_CONSUMERS + NUM_PRODUCERS, 1)
    mla_decode_sm90(const __grid_constant__ MlaDecodeSm90Params p) {
    extern __shared__ __align__(1024) char smem_bytes[];
    using Consumer = LatentConsumer<CKV, KPE>;
    using Producer = typename Select<
        is_fp8<CKV>, LatentFp8Producer<KPE, MAPPED>, LatentProducer<KPE, MAPPED>>::type;
    auto& smem = *reinterpret_cast<typename Consumer::Smem*>(smem_bytes);
    const int block = blockIdx.x % p.work.num_kv_heads;
    const int part = blockIdx.x / p.work.num_kv_heads;
    if (threadIdx.x == 0) {
        if constexpr (is_fp8<CKV>) {
            Producer::init(smem);
        }
        smem.init();
        if constexpr (MAPPED) {
            prefetch_tensormap(p.ckv_map);
            prefetch_tensormap(p.kpe_map);
        }
    }
    __syncthreads();  // barriers are there
    // From one lane, so that the compiler knows: a warp takes one branch.
    const int warp_idx = __shfl_sync(0xffffffffu, threadIdx.x / WARP_SIZE, 0);
    if (warp_idx < NUM_CONSUMERS / WARP_SIZE) {
        setmaxnreg_inc<224>();  // with the others': 384 threads began with 168 each
        // By those who have nothing to do yet.
        prefetch_first_rows<CKV, KPE, 2 * LATENT_TOKENS, NUM_CONSUMERS>(p, part);
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        Consumer consumer(p, smem, warp_idx);
        consumer.run(block, part);
    } else {
        setmaxnreg_dec<56>();
        griddepcontrol_wait();
        Producer producer(p, smem, warp_idx - NUM_CONSUMERS / WARP_SIZE);
        producer.run(block, part);
    }
}

}  // namespace cukv
