/// \file
/// Quantising passes compute scales and means from finite values only and turn an infinity into
/// NaN. So one infinite input affects only its own channel, not the scale of all (docs/notation.md,
/// "NaN and infinities").
#pragma once

#include "attn/kernel.h"

namespace attn {
inline namespace ATTN_BACKEND {

/// x, or NaN if x is infinite or NaN. e4m3 has no infinity: a saturating conversion would write
/// 448. fmaxf ignores NaN, so a maximum of results is a maximum of finite values.
__device__ __forceinline__ float finite_or_nan(float x) { return x + 0 * x; }

/// Sum, minimum and maximum of finite values.
struct FiniteColumn {
  float sum = 0, least = INFINITY, most = -INFINITY;
};
/// The same over a column of `count` rows, `stride` elements apart. The slow path of a pass whose
/// sum is NaN or infinite.
inline __device__ FiniteColumn finite_column(const __nv_bfloat16* g, int64_t stride, int count) {
  FiniteColumn c;
  for (int row = 0; row < count; ++row) {
    const float x = to_float(g[row * stride]);
    if (!(fabsf(x) < INFINITY)) continue;
    c.sum += x, c.least = fminf(c.least, x), c.most = fmaxf(c.most, x);
  }
  return c;
}

}  // namespace ATTN_BACKEND
}  // namespace attn
