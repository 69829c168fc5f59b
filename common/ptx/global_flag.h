/// \file
/// Flags and counters (semaphores) in global memory for synchronisation between thread blocks. PTX
/// ISA, "ld.acquire", "st.release", "atom.acq_rel", scope gpu (sm_70 and later); "Memory
/// Consistency Model", release and acquire patterns.
///
///     block 0   stores partial   __syncthreads()   one thread: flag_store(flag, 1)
///     block 1   one thread: flag_wait(flag, 1)   __syncthreads()   loads partial
///
/// All stores and reductions before the release, including those of the block's other threads
/// before the barrier, are visible after the acquire, and to all threads of the acquiring block
/// after its barrier. A block that waits requires the other one to make progress: either all blocks
/// of the grid are resident, or each waits only for work that was taken from a counter before its
/// own.
#pragma once

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// Release: stores a value after all stores that this thread has done or observed.
__device__ __forceinline__ void flag_store(unsigned* flag, unsigned value ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().flag(
      "flag_store", caller, flag, [=] { *flag = value; }, true, false);
#else
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#endif
}

/// Acquire and release: adds to a counter and returns its previous value. All stores that earlier
/// adders had done or observed are visible afterwards.
__device__ __forceinline__ unsigned flag_add(unsigned* counter, unsigned value ATTN_CALLER) {
  unsigned before;
#ifdef ATTN_EMULATED
  emulator::Block::current().flag(
      "flag_add", caller, counter, [&] { before = *counter, *counter += value; }, true, true);
#else
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
#endif
  return before;
}

/// Acquire: returns the value. All stores before the release that wrote it are visible afterwards.
__device__ __forceinline__ unsigned flag_load(const unsigned* flag ATTN_CALLER) {
  unsigned value;
#ifdef ATTN_EMULATED
  emulator::Block::current().flag(
      "flag_load", caller, flag, [&] { value = *flag; }, false, true);
#else
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
#endif
  return value;
}

/// Spins until the flag is `value`, then acquires: all stores before the release that wrote it are
/// visible. To be called by one thread of a block.
__device__ __forceinline__ void flag_wait(const unsigned* flag, unsigned value ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().wait_until("flag_wait", caller, [=] { return *flag == value; });
  emulator::Block::current().flag(
      "flag_wait", caller, flag, [] {}, false, true);
#else
  while (flag_load(flag) != value) __nanosleep(32);
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
