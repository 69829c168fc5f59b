// Rows of accumulators that no block of attention has as its first or last: set to zero before, and
// converted to O after all blocks. Ranks without visible keys and windows need it.
#pragma once

#include "attn/kernel.h"

namespace ATTN_BACKEND::ranks {
using namespace attn;

struct RowRange {
  int64_t first, count, heads, head_dim, lse_stride;
};

__global__ static void clear_rows_kernel(float* gOAcc, float* gLse, RowRange rows) {
  const int64_t width = rows.heads * rows.head_dim;
  for (int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    for (int64_t col = threadIdx.x; col < width; col += blockDim.x)
      gOAcc[(rows.first + row) * width + col] = 0;
    for (int64_t h = threadIdx.x; h < rows.heads; h += blockDim.x)
      gLse[h * rows.lse_stride + rows.first + row] = -INFINITY;
  }
}
template <class Element>
__global__ static void convert_rows_kernel(Element* gO, const float* gOAcc, RowRange rows) {
  const int64_t width = rows.heads * rows.head_dim;
  for (int64_t row = blockIdx.x; row < rows.count; row += gridDim.x)
    for (int64_t col = threadIdx.x; col < width; col += blockDim.x) {
      const int64_t at = (rows.first + row) * width + col;
      gO[at] = from_float<Element>(gOAcc[at]);
    }
}

inline unsigned blocks_for(const RowRange& rows) {
  return static_cast<unsigned>(rows.count < 1024 ? rows.count : 1024);
}
inline Status clear_rows(Stream stream, float* o_acc, float* lse, const RowRange& rows) {
  return launch_kernel(clear_rows_kernel, dim3(blocks_for(rows)), dim3(256), 0, stream, o_acc, lse,
                       rows);
}
template <class Element>
Status convert_rows(Stream stream, Element* o, const float* o_acc, const RowRange& rows) {
  return launch_kernel(convert_rows_kernel<Element>, dim3(blocks_for(rows)), dim3(256), 0, stream,
                       o, o_acc, rows);
}

}  // namespace ATTN_BACKEND::ranks
