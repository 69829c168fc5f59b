// Variants of attention for v10: softcap and ALiBi, which change a score, and sinks, which change
// the denominator.
#pragma once

#include "attn/kernel.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::paged {
using namespace attn;

// Maps the dot product of a query and a key to a score in log2 units.
//! [variant]
template <bool kSoftcap, bool kAlibi>
struct Variant {
  static constexpr bool kHasSlopes = kAlibi;
  float scale_log2, scale_by_cap, cap_log2;
  // `slope_log2`: ALiBi slope of the head; `distance`: from the key to the query's diagonal.
  __device__ __forceinline__ float operator()(float x, float slope_log2, int distance) const {
    if constexpr (kSoftcap) {  // tanh y = 1 - 2 / (e^2y + 1); cancellation near 0: Taylor series
      const float y = x * scale_by_cap, y2 = y * y;
      const float series = y * fmaf(y2, fmaf(y2, fmaf(y2, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1);
      const float whole = fmaf(-2, __fdividef(1, exp2f(2 * kLog2e * y) + 1), 1);
      x = cap_log2 * (fabsf(y) < 0.25f ? series : whole);
    } else {
      x *= scale_log2;
    }
    if constexpr (kAlibi) x = fmaf(-slope_log2, fabsf(static_cast<float>(distance)), x);
    return x;
  }
};
//! [variant]

// Adds exp2(sink_log2) to the denominator `sum`, both relative to 2^max; returns the factor by
// which O must be rescaled if the sink raises `max`. Called after the last key: a running max that
// starts at the sink would make P of much lower scores subnormal in fp16. -inf: no sink.
//! [sink]
__device__ __forceinline__ float add_sink(float sink_log2, float& max, float& sum) {
  const float before = max;
  max = fmaxf(max, sink_log2);
  const float rescale = exp2f(before - max);
  sum = fmaf(sum, rescale, exp2f(sink_log2 - max));
  return rescale;
}
//! [sink]

}  // namespace ATTN_BACKEND::paged
