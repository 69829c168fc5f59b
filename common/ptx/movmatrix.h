/// \file
/// `movmatrix`: transposes an 8 x 8 matrix of 16-bit elements in the registers of a warp. Source:
/// PTX ISA, "movmatrix" (sm_75 and later).
#pragma once

#include <cstdint>

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// Layout before and after, as in an `mma` fragment: lane 4g + t holds elements 2t and 2t + 1 of
/// row g. All lanes of the warp must call it.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t pair) {
#ifdef ATTN_EMULATED
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, half = 16 * (g % 2);
  const uint32_t low = __shfl_sync(~0u, pair, 8 * t + g / 2) >> half & 0xFFFF;
  const uint32_t high = __shfl_sync(~0u, pair, 8 * t + 4 + g / 2) >> half & 0xFFFF;
  return low | high << 16;
#else
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
