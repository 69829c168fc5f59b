/// \file
/// `setmaxnreg`: registers that a warpgroup gives back or asks for. PTX ISA, "Miscellaneous instructions" (sm_90a).
#pragma once

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// All four warps of a warpgroup call it: from here on a thread has at most kRegisters (24 to 256, a multiple of 8).
/// A block begins with the same number for all its threads, as `__launch_bounds__` implies; without it the compiler
/// ignores these calls.
template <int kRegisters>
__device__ __forceinline__ void registers_give(ATTN_ONLY_CALLER) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
#ifdef ATTN_EMULATED
  emulator::Block::current().registers("registers_give", caller, kRegisters, false);
#else
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

/// Waits until that many are free in the block's share: what it was launched with, not 65536. A block of 384 threads
/// has 65536 / 384, rounded down to 168 a thread, so that one lane of its three warpgroups has 504. With 32 + 2 * 240
/// the last one to ask waits for ever; the emulator says so.
template <int kRegisters>
__device__ __forceinline__ void registers_take(ATTN_ONLY_CALLER) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
#ifdef ATTN_EMULATED
  emulator::Block::current().registers("registers_take", caller, kRegisters, true);
#else
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
