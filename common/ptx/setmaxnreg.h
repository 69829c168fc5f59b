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
__device__ __forceinline__ void registers_give() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
#ifndef ATTN_EMULATED
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

/// Waits until that many are free in the block's share.
template <int kRegisters>
__device__ __forceinline__ void registers_take() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
#ifndef ATTN_EMULATED
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
