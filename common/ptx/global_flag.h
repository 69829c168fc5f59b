/// \file
/// Flags in global memory by which blocks wait for one another. PTX ISA, "ld.acquire",
/// "st.release", "atom.acq_rel", scope gpu (sm_70 and later); "Memory Consistency Model", release
/// and acquire patterns.
///
///     block 0   writes partial   __syncthreads()   one thread: flag_store(flag, 1)
///     block 1   one thread: flag_wait(flag, 1)   __syncthreads()   reads partial
///
/// Everything that happened before the release, its block's stores before the barrier included, is
/// visible after the acquire, and to the acquiring thread's block after its barrier. A block that
/// waits needs the other one to be resident: on a GPU with fewer free places than blocks it
/// deadlocks.
#pragma once

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// Stores a value, after all that this thread knows of.
__device__ __forceinline__ void flag_store(unsigned* flag, unsigned value ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().flag(
      "flag_store", caller, flag, [=] { *flag = value; }, true, false);
#else
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#endif
}

/// Adds to a counter, after all that this thread knows of; what others knew who added before is
/// known from here on. Returns what was there.
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

/// The value that is there, and what was known to whoever stored it.
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

/// Waits until `value` is there; what was known to whoever stored it is known from here on. By one
/// thread of a block.
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
