// Masks and reductions on accumulators, shared by the forward steps of this chapter.
//
// Accumulator layout, as drawn in ptx/mma.h: of 8 columns a lane has columns 2 (lane % 4) and the
// next one, of rows lane / 4 and lane / 4 + 8. A quad of four lanes shares a row.
#pragma once

#include "attn/kernel.h"

namespace ATTN_BACKEND::flash2 {
using namespace attn;

// Finite initial row maximum: avoids (-inf) - (-inf) = NaN.
constexpr float kLowest = -3.4028234e38f;

// threadIdx.x, read again at each use: kept in a variable, it and the values derived from it would
// occupy registers throughout the loop.
__device__ __forceinline__ int thread_index() {
#ifdef ATTN_EMULATED
  return static_cast<int>(threadIdx.x);
#else
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
#endif
}

__device__ __forceinline__ float quad_max(float x) {  // over the 4 lanes that share a row
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Sets masked scores to -inf. `row_minus_col`: diagonal of this lane's first row, relative to its
// first key; `left`: number of keys from the first column on. The bounds shift with the row. One
// loop per edge: one loop for both would spill registers.
//! [mask]
template <int kTiles, int kColumns>
__device__ __forceinline__ void apply_mask(float (&s)[kTiles][kColumns][4], const Shape& shape,
                                           int row_minus_col, int left) {
  const auto mask_where = [&](auto unseen) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (unseen(8 * n + i % 2, 16 * m + 8 * (i / 2))) s[m][n][i] = -INFINITY;
  };
  const int last = row_minus_col + shape.window_right, first = row_minus_col - shape.window_left;
  if (shape.window_right < Shape::kNoWindow)
    mask_where([&](int key, int row) { return key - row > last; });
  if (shape.window_left < Shape::kNoWindow)
    mask_where([&](int key, int row) { return key - row < first; });
  if (const int keys = left - thread_index() % 4 * 2; left < 8 * kColumns)
    mask_where([&](int key, int) { return key >= keys; });
}
//! [mask]

}  // namespace ATTN_BACKEND::flash2
