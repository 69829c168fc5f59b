// The merge of two partial results of attention, (O, lse): of two warps, two thread blocks or two
// GPUs.
#pragma once

#include "attn/kernel.h"

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
    if (max == -INFINITY) return;
    const float a = exp2f(kLog2e * (lse_a - max)), b = exp2f(kLog2e * (lse_b - max));
    const float sum = a + b, inverse = 1 / sum;
    weight_a = a * inverse, weight_b = b * inverse, lse = max + kLn2 * log2f(sum);
  }
};
//! [merge_of_two]

}  // namespace ATTN_BACKEND::ranks
