/// \file
/// `red`: atomic additions to global memory without a return value. PTX ISA, "red" (vectors: sm_90
/// and later).
#pragma once

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// Adds four floats to four adjacent ones in global memory, 16-byte aligned. Each of the four
/// additions is atomic. Their order is not defined, so sums may differ in the last bits between
/// runs.
__device__ __forceinline__ void reduce_add(float4* address, float4 value) {
#if !defined(ATTN_EMULATED) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
#else
  float* const at = &address->x;
  atomicAdd(at, value.x);
  atomicAdd(at + 1, value.y);
  atomicAdd(at + 2, value.z);
  atomicAdd(at + 3, value.w);
#endif
}

}  // namespace ATTN_BACKEND
}  // namespace attn
