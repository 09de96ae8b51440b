// PTX instructions, one function each, named as the instruction. Nothing else holds inline asm.
#pragma once

namespace cukv {

// Waits until `threads` threads of the CTA have come to barrier ID; orders their memory accesses.
// Unlike __syncthreads it may stand in different branches of different warps.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
template <int ID>
__device__ __forceinline__ void bar_sync(int threads) {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "r"(threads) : "memory");
}

}  // namespace cukv
