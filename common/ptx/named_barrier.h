/// \file
/// Named barriers: `bar.sync` for a subset of the warps of a block. PTX ISA, "barrier{.cta}".
#pragma once

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// Waits until `threads` threads (whole warps) of the block have arrived at barrier `id`, 1 to 15;
/// __syncthreads uses 0. As after __syncthreads, stores before it are visible to all of them.
__device__ __forceinline__ void named_barrier_sync(int id, int threads ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().named_barrier("named_barrier_sync", caller,
                                           static_cast<std::size_t>(id),
                                           static_cast<std::size_t>(threads), true);
#else
  ATTN_STAMP_BEGIN
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
  ATTN_STAMP_END(named_wait, id)
#endif
}

/// Arrives without waiting. `threads` counts both waiting and arriving threads.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().named_barrier("named_barrier_arrive", caller,
                                           static_cast<std::size_t>(id),
                                           static_cast<std::size_t>(threads), false);
#else
  ATTN_STAMP_BEGIN
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
  ATTN_STAMP_END(named_arrive, id)
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
