/// \file
/// Index of the SM that a block runs on.
#pragma once

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// The index is below 2^10 on all current GPUs; indices need not be contiguous (PTX ISA, %smid). It
/// may change if a block is rescheduled to another SM. The emulator has three SMs.
__device__ __forceinline__ unsigned sm_id() {
#ifdef ATTN_EMULATED
  return blockIdx.x % 3;
#else
  unsigned id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
