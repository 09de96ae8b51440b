// PTX instructions, one function each, named as the instruction. Nothing else holds inline asm.
// Addresses of shared memory are 32-bit, as `smem_address` gives them.
// https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once
#include "common/types.cuh"

namespace cukv {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// This thread's number in the CTA, read here and now: what the compiler works out from threadIdx.x
// it keeps in registers over whole loops.
__device__ __forceinline__ int tid_x() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    __builtin_assume(x >= 0);  // else every division by a warp's threads rounds towards 0
    return x;
}

// Waits until `threads` threads of the CTA have come to barrier ID; orders their memory accesses.
// Unlike __syncthreads it may stand in different branches of different warps.
template <int ID>
__device__ __forceinline__ void bar_sync(int threads) {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "r"(threads) : "memory");
}

// Whether a kernel may be launched before the launches before it have ended.
#if __CUDA_ARCH__ >= 900
constexpr bool LAUNCHED_EARLY = true;
#else
constexpr bool LAUNCHED_EARLY = false;
#endif

// Whether the compiler keeps more registers busy than for other architectures: what just fits there
// spills here.
#if __CUDA_ARCH__ >= 1000
constexpr bool SHORT_OF_REGISTERS = true;
#else
constexpr bool SHORT_OF_REGISTERS = false;
#endif

// Waits until all launches before this one have ended and what they wrote can be read. A kernel
// that the host launches early comes here before it writes anything, and before it relies on
// anything it reads but its parameters and inputs that are ready (common/attention.cuh).
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next launch be placed, if it is an early one, once a thread of every CTA has come here
// or the CTA has ended. What it waits for is still the end of this launch.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 2^x; 2^-inf is +0.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// c + a b, all bits of the product.
__device__ __forceinline__ uint64_t mad_wide(uint32_t a, uint32_t b, uint64_t c) {
    uint64_t d;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(d) : "r"(a), "r"(b), "l"(c));
    return d;
}

// Two floats rounded to a pair of half or bfloat16, `low` in the low half.
template <typename DType>
__device__ __forceinline__ uint32_t cvt_pair(float low, float high) {
    uint32_t pair;
    if constexpr (is_same<DType, half>) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    } else {
        static_assert(is_same<DType, bfloat16>, "pairs are of half or bfloat16");
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    }
    return pair;
}

// No instruction: a number of which the compiler knows nothing, so that it does not work out long
// before what follows from it, and keep that in registers.
__device__ __forceinline__ int32_t opaque(int32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The 16-bit halves of a word, as two registers: what takes 16 bits reads either half of one.
__device__ __forceinline__ void mov_halves(uint16_t& low, uint16_t& high, uint32_t word) {
    asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(word));
}

// Adds to a counter of all CTAs and gives what it was. What this thread has written or seen written
// before is seen by whoever finds the new count, and what others had then, by this thread after.
__device__ __forceinline__ int32_t atom_add_acq_rel(int32_t* counter, int32_t x) {
    int32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(x)
                 : "memory");
    return before;
}

// Loads a word, and sees all that was written before the store that it finds there.
__device__ __forceinline__ int32_t ld_acquire(const int32_t* from) {
    int32_t x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

// Loads 16 bytes here and now: the compiler moves a plain load behind a branch that may not need
// it.
__device__ __forceinline__ uint4 ld_global_16(const void* from) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

// Starts bringing the line of an address into the L2. It is a hint: what is read later is what is
// in memory then, whoever writes it meanwhile.
__device__ __forceinline__ void prefetch_l2(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// The same for a run of bytes, which like its address are a multiple of 16.
__device__ __forceinline__ void cp_async_bulk_prefetch_l2(const void* from, uint32_t num_bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(num_bytes));
#endif
}

// How the L2 should treat lines: first to be evicted, or as any other.
__device__ __forceinline__ uint64_t createpolicy_evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t createpolicy_evict_unchanged() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Starts a copy of 16 bytes, of which the first src_bytes are read and the others become zeros.
__device__ __forceinline__ void cp_async_16(uint32_t to_smem, const void* from, int src_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to_smem), "l"(from),
                 "r"(src_bytes)
                 : "memory");
}

// The same under a policy of the L2.
__device__ __forceinline__ void cp_async_16(
    uint32_t to_smem, const void* from, int src_bytes, uint64_t policy) {
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to_smem),
        "l"(from), "r"(src_bytes), "l"(policy)
        : "memory");
}

// Starts a copy of 4 bytes, if there is one: without a branch.
__device__ __forceinline__ void cp_async_4_if(bool given, uint32_t to_smem, const void* from) {
    asm volatile(
        "{\n"
        ".reg .pred given;\n"
        "setp.ne.s32 given, %2, 0;\n"
        "@given cp.async.ca.shared.global [%0], [%1], 4;\n"
        "}\n" ::"r"(to_smem),
        "l"(from), "r"(int{given})
        : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the PENDING latest groups of this thread's copies have landed.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, a row of 16 bytes from each lane's address; lane l gets
// elements 2 * (l % 4) and + 1 of row l / 4 of each (trans: of column l / 4).
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(smem)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(smem)
                 : "memory");
}

// An 8 x 8 matrix of 16-bit elements, of which lane l has elements 2 * (l % 4) and + 1 of row l /
// 4, transposed: it gets them of column l / 4.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// c += a b with a [16, 16], b [16, 8], c [16, 8] float32. Lane l, g = l / 4, t = 2 * (l % 4):
//   a[0], a[1] = rows g, g + 8 of columns t, t + 1;  a[2], a[3] = the same of columns t + 8, t + 9
//   b[0], b[1] = rows t, t + 1 and t + 8, t + 9 of column g
//   c[0..1], c[2..3] = columns t, t + 1 of rows g, g + 8
template <typename DType>
__device__ __forceinline__ void mma_m16n8k16(
    float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (is_same<DType, half>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        static_assert(is_same<DType, bfloat16>, "tensor cores take half or bfloat16 here");
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

}  // namespace cukv
