/// \file
/// `setmaxnreg`: a warpgroup releases registers (`.dec`) or requests more (`.inc`). PTX ISA,
/// "Miscellaneous instructions" (sm_90a).
#pragma once

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// Releases registers: each thread has at most kRegisters afterwards (24 to 256, a multiple of 8).
/// All four warps of the warpgroup must call it. The kernel needs `__launch_bounds__`, which fixes
/// the number of registers at launch; without it the compiler ignores these calls.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec(ATTN_ONLY_CALLER) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
#ifdef ATTN_EMULATED
  emulator::Block::current().registers("setmaxnreg_dec", caller, kRegisters, false);
#else
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

/// Requests registers: waits until enough of the block's registers are free. The pool is what the
/// block was launched with, not the SM's 65536. Example: 384 threads have 65536 / 384 registers
/// each, rounded down to 168. Counted per thread, its three warpgroups have 504 together. With 32 +
/// 2 * 240 the last request deadlocks; the emulator reports this.
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
