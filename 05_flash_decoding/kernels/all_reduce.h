// The merge of the partial results of all ranks by two all-reduces: of the largest lse, then of
// weighted O and weights. A rank without visible keys has weight 0.
#pragma once

#include "attn/kernel.h"
#include "kernels/merge.h"

namespace ATTN_BACKEND::ranks {
using namespace attn;

// Before the sum: O times its weight, and the weight instead of lse. `gMax`: the largest lse over
// the ranks. One thread per four columns.
__global__ static void weigh_kernel(float* gPart, const float* gMax, int rows, int head_dim) {
  const int row = static_cast<int>(blockIdx.x);
  float* const lse = gPart + int64_t{rows} * head_dim + row;
  const float weight = gMax[row] == -INFINITY ? 0 : exp2f(kLog2e * (*lse - gMax[row]));
  float4& o = *reinterpret_cast<float4*>(gPart + int64_t{row} * head_dim + 4 * threadIdx.x);
  o.x *= weight, o.y *= weight, o.z *= weight, o.w *= weight;
  __syncthreads();  // all threads have read lse
  if (threadIdx.x == 0) *lse = weight;
}
template <class Element>
__global__ void divide_kernel(Element* gO, float* gLse, const float* gPart, const float* gMax,
                              int rows, int head_dim) {
  const int row = static_cast<int>(blockIdx.x), col = 4 * static_cast<int>(threadIdx.x);
  const float sum = gPart[int64_t{rows} * head_dim + row];
  float out[4] = {};
  flash_decoding::add_scaled(
      out, 1, *reinterpret_cast<const float4*>(gPart + int64_t{row} * head_dim + col));
  flash_decoding::store_row_part(gO + int64_t{row} * head_dim + col, out, sum != 0 ? 1 / sum : 0);
  if (col == 0) gLse[row] = sum != 0 ? gMax[row] + kLn2 * log2f(sum) : -INFINITY;
}
__global__ static void copy_lse_kernel(float* gMax, const float* gLse, int rows) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row < rows) gMax[row] = gLse[row];
}

}  // namespace ATTN_BACKEND::ranks
