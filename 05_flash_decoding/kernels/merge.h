// The merge of two partial results of attention, (O, lse): of two warps, two thread blocks or two
// GPUs.
#pragma once

#include "attn/kernel.h"
#include "kernels/decode/rows.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::ranks {
using namespace attn;

// O = weight_a O_a + weight_b O_b. A part without visible keys has lse = -inf and weight 0; if both
// have none, -inf - (-inf) would be NaN.
//! [merge_of_two]
struct Merge {
  float weight_a = 0, weight_b = 0, lse = -INFINITY;
  Merge() = default;
  __device__ Merge(float lse_a, float lse_b) {
    const float max = fmaxf(lse_a, lse_b);
    if (lse_a == -INFINITY && lse_b == -INFINITY) return;  // not `max`: fmaxf drops a NaN
    const float a = exp2f(kLog2e * (lse_a - max)), b = exp2f(kLog2e * (lse_b - max));
    const float sum = a + b, inverse = 1 / sum;
    weight_a = a * inverse, weight_b = b * inverse, lse = max + kLn2 * log2f(sum);
  }
};
//! [merge_of_two]

// Floats of a rank's partial result: O [rows, d], then lse [rows], padded so that the next one
// begins at a multiple of 16 bytes.
__host__ __device__ constexpr int64_t part_floats(int64_t rows, int64_t head_dim) {
  return rows * head_dim + round_up<int64_t>(rows, 4);
}

// Four columns of O in fp32.
__device__ __forceinline__ void store_part(float* to, const float (&o)[4], float factor) {
  *reinterpret_cast<float4*>(to) =
      make_float4(o[0] * factor, o[1] * factor, o[2] * factor, o[3] * factor);
}

// The merge of `world` partial results of a row: one thread per four columns, in the order of the
// ranks, so that all ranks have the same bits.
//! [merge_of_ranks]
template <class Element, int kHeadDim>
__device__ __forceinline__ void merge_row_of_ranks(Element* gO, float* gLse, const float* gParts,
                                                   int world, int rows, int row, int col) {
  const int64_t part = part_floats(rows, kHeadDim);
  float max = flash_decoding::kLowest, sum = 0, out[4] = {};
  for (int n = 0; n < world; ++n)
    max = fmaxf(max, gParts[n * part + int64_t{rows} * kHeadDim + row]);
  for (int n = 0; n < world; ++n) {
    const float lse = gParts[n * part + int64_t{rows} * kHeadDim + row];
    const float weight = exp2f(kLog2e * (lse - max));  // 0 for a rank without visible keys
    sum += weight;
    flash_decoding::add_scaled(
        out, weight,
        *reinterpret_cast<const float4*>(gParts + n * part + int64_t{row} * kHeadDim + col));
  }
  flash_decoding::store_row_part(gO + int64_t{row} * kHeadDim + col, out, sum != 0 ? 1 / sum : 0);
  if (col == 0) gLse[row] = sum != 0 ? max + kLn2 * log2f(sum) : -INFINITY;
}
//! [merge_of_ranks]
template <class Element, int kHeadDim>
__global__ void merge_parts_kernel(Element* gO, float* gLse, const float* gParts, int world,
                                   int rows) {
  merge_row_of_ranks<Element, kHeadDim>(gO, gLse, gParts, world, rows, static_cast<int>(blockIdx.x),
                                        static_cast<int>(threadIdx.x) * 4);
}

}  // namespace ATTN_BACKEND::ranks
