/// \file
/// Flags for synchronisation with other GPUs and the host: release and acquire at system scope. PTX
/// ISA, "Memory Consistency Model", "Scope". ptx/global_flag.h has them for the blocks of one GPU;
/// a flag of that scope tells other GPUs nothing.
#pragma once

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// Release: stores a value after all stores that this thread has done or observed. The flag lies in
/// memory of any GPU, mapped here, or of the host.
__device__ __forceinline__ void system_flag_store(unsigned* flag, unsigned value ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().flag(
      "system_flag_store", caller, flag, [=] { *flag = value; }, true, false);
#else
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#endif
}

/// Acquire: returns the value. All stores before the release that wrote it are visible afterwards.
__device__ __forceinline__ unsigned system_flag_load(const unsigned* flag ATTN_CALLER) {
  unsigned value;
#ifdef ATTN_EMULATED
  emulator::Block::current().flag(
      "system_flag_load", caller, flag, [&] { value = *flag; }, false, true);
#else
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
#endif
  return value;
}

/// Whether a flag that counts up, and may wrap around, has come to `value`.
__host__ __device__ inline bool flag_has_come(unsigned flag, unsigned value) {
  return static_cast<int>(flag - value) >= 0;
}
/// Spins until the flag has come to `value`, then acquires. One thread of a block calls it. A flag
/// may be beyond it: its rank may be a launch ahead.
__device__ __forceinline__ void system_flag_wait(const unsigned* flag, unsigned value ATTN_CALLER) {
#ifdef ATTN_EMULATED
  emulator::Block::current().wait_until("system_flag_wait", caller,
                                        [=] { return flag_has_come(*flag, value); });
  emulator::Block::current().flag(
      "system_flag_wait", caller, flag, [] {}, false, true);
#else
  while (!flag_has_come(system_flag_load(flag), value)) __nanosleep(64);
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
