// PTX instructions that only sm_90a has, one function each, named as the instruction: barriers that
// count bytes, copies by tensor map, products of a warpgroup (four warps, the first of them a
// multiple of four).
// https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once
#include "common/ptx.cuh"

namespace cukv {

// How a copy finds its box in an array; the host has the driver make it (CUtensorMap of cuda.h).
struct alignas(64) TensorMap {
    uint8_t opaque[128];
};

// As the other bar_sync, of a barrier that is known at run time: the CTA then has all 16.
__device__ __forceinline__ void bar_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// As bar_sync<ID>; gives whether `predicate` was true of any of the threads.
template <int ID>
__device__ __forceinline__ bool bar_red_or(int threads, bool predicate) {
    uint32_t any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\n"
        "selp.u32 %0, 1, 0, q;\n}"
        : "=r"(any)
        : "r"(static_cast<uint32_t>(predicate)), "n"(ID), "r"(threads)
        : "memory");
    return any != 0;
}

// A barrier in shared memory has phases; a phase ends when `arrivals` have come and all bytes that
// they announced have landed. Who waits names the phase by its parity: 0 for the first, then 1.
__device__ __forceinline__ void mbarrier_init(uint64_t& barrier, int arrivals) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(&barrier)), "r"(arrivals));
}

// Makes barriers that this thread has set up known to copies.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(&barrier))
                 : "memory");
}

// Arrives when all copies that this thread has started by cp.async have landed: an arrival that the
// barrier counts with.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint64_t& barrier) {
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(&barrier))
        : "memory");
}

// Arrives, and announces bytes that copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t& barrier, int num_bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(&barrier)),
        "r"(num_bytes)
        : "memory");
}

__device__ __forceinline__ bool mbarrier_test_wait(uint64_t& barrier, uint32_t parity) {
    uint32_t ended;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended)
        : "r"(smem_address(&barrier)), "r"(parity)
        : "memory");
    return ended != 0;
}

// Waits for the end of a phase.
__device__ __forceinline__ void mbarrier_try_wait(uint64_t& barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again;\n}" ::"r"(smem_address(&barrier)),
        "r"(parity)
        : "memory");
}

// Orders what this thread has written to shared memory before copies and products that read it.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Starts bringing a tensor map to where copies look for it.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts copying the box at the given coordinates to shared memory, zeros where it leaves the
// array.
__device__ __forceinline__ void cp_async_bulk_tensor_3d(
    uint32_t to_smem, const TensorMap& map, uint64_t& barrier, int32_t x0, int32_t x1, int32_t x2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to_smem),
        "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(smem_address(&barrier))
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d(
    uint32_t to_smem,
    const TensorMap& map,
    uint64_t& barrier,
    int32_t x0,
    int32_t x1,
    int32_t x2,
    int32_t x3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to_smem),
        "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(smem_address(&barrier))
        : "memory");
}

// The same under a policy of the L2, as for cp_async_16.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(
    uint32_t to_smem,
    const TensorMap& map,
    uint64_t& barrier,
    int32_t x0,
    int32_t x1,
    int32_t x2,
    int32_t x3,
    uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_"
        "hint "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to_smem),
        "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(smem_address(&barrier)), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d(
    uint32_t to_smem,
    const TensorMap& map,
    uint64_t& barrier,
    int32_t x0,
    int32_t x1,
    int32_t x2,
    int32_t x3,
    int32_t x4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to_smem),
        "l"(&map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(smem_address(&barrier))
        : "memory");
}

// Starts copying a box from shared memory to an array; what would leave the array is not written.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(
    const TensorMap& map, int32_t x0, int32_t x1, int32_t x2, int32_t x3, uint32_t from_smem) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
            &map),
        "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(from_smem)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the PENDING latest groups of this thread's stores have read shared memory.
template <int PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Gives registers of a warpgroup away, or takes what others gave, until each thread has REGISTERS.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Four 8 x 8 matrices of 16-bit elements from where ldmatrix_x4 would put them, a row of 16 bytes
// to each lane's address.
__device__ __forceinline__ void stmatrix_x4(uint32_t smem, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// Four floats rounded to e4m3, the first in the lowest byte; what is too large becomes 448.
__device__ __forceinline__ uint32_t cvt_e4m3x4(float x0, float x1, float x2, float x3) {
    uint32_t four;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(four)
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return four;
}

// Stores a float by a predicated instruction, where a branch would not do.
__device__ __forceinline__ void st_shared_if(bool stores, float& to, float x) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.shared.f32 [%0], %1;\n}" ::"r"(
                     smem_address(&to)),
                 "f"(x), "r"(static_cast<int32_t>(stores))
                 : "memory");
}

}  // namespace cukv
