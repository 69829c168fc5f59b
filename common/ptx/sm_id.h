/// \file
/// The SM that a block runs on.
#pragma once

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// Its number: below 2^10 on any GPU of today, though numbers may be left out (PTX ISA, %smid). A
/// block that is moved has another one later. The emulator deals blocks out to three SMs.
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
