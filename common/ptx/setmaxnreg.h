/// \file
/// `setmaxnreg`: a warpgroup releases registers (`.dec`) or requests more (`.inc`). PTX ISA, "Miscellaneous instructions" (sm_90a).
#pragma once

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// All four warps of a warpgroup call it: from here on a thread has at most kRegisters (24 to 256,
/// a multiple of 8). A block begins with the same number for all its threads, as
/// `__launch_bounds__` implies; without it the compiler ignores these calls.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec(ATTN_ONLY_CALLER) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
#ifdef ATTN_EMULATED
  emulator::Block::current().registers("setmaxnreg_dec", caller, kRegisters, false);
#else
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

/// Waits until that many are free among the block's registers: those it was launched with, not
/// 65536. A block of 384 threads has 65536 / 384 per thread, rounded down to 168, so that one lane
/// of each of its three warpgroups together have 504. With 32 + 2 * 240 the last request deadlocks;
/// the emulator says so.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc(ATTN_ONLY_CALLER) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
#ifdef ATTN_EMULATED
  emulator::Block::current().registers("setmaxnreg_inc", caller, kRegisters, true);
#else
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
