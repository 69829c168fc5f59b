// Chapter 05's rows and key ranges in this chapter's namespace, and an inclusive prefix sum over
// the lanes of a warp.
#pragma once

#include "kernels/decode/rows.h"

namespace ATTN_BACKEND::paged {
using namespace flash_decoding;

// Inclusive prefix sum over the lanes of a warp.
__device__ __forceinline__ int sum_up(int sum) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(~0u, sum, distance);
    if (static_cast<int>(threadIdx.x % 32) >= distance) sum += before;
  }
  return sum;
}

}  // namespace ATTN_BACKEND::paged
