// Softcap, ALiBi and dropout, for v12_features and v13_tuned.
#pragma once

#include "attn/kernel.h"
#include "attn/philox.h"
#include "kernels/fragments.h"

namespace ATTN_BACKEND::flash2 {
using namespace attn;

// Softcap and ALiBi; converts scores to log2 units, with no factor left to apply. `diagonal`:
// diagonal of this lane's first row, relative to its first key.
//! [features]
template <int kTiles, int kColumns>
__device__ __forceinline__ void apply_softcap_and_alibi(float (&s)[kTiles][kColumns][4],
                                                        const Shape& shape, float slope_log2,
                                                        int diagonal) {
  const auto each = [&](auto change) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[m][n][i] = change(s[m][n][i], 16 * m + 8 * (i / 2) - 8 * n - i % 2);
  };
  if (shape.softcap > 0) {
    const float cap = shape.softcap * kLog2e, in = shape.softmax_scale / shape.softcap;
    // tanh y = 1 - 2 / (e^2y + 1) cancels near 0: use the Taylor series there.
    each([&](float x, int) {
      const float y = x * in, y2 = y * y;
      const float series = y * fmaf(y2, fmaf(y2, fmaf(y2, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1);
      return cap *
             (fabsf(y) < 0.25f ? series : fmaf(-2, __fdividef(1, exp2f(2 * kLog2e * y) + 1), 1));
    });
  } else {
    each([&](float x, int) { return x * (shape.softmax_scale * kLog2e); });
  }
  if (slope_log2 > 0) {
    const float distance = static_cast<float>(diagonal);
    each([&](float x, int further) {
      return fmaf(-slope_log2, fabsf(distance + static_cast<float>(further)), x);
    });
  }
}
//! [features]

// Zeroes the dropped probabilities of row `row` (row `r` of each accumulator). One Philox call
// gives the lane's 16 bytes for 64 keys.
template <int kColumns>
__device__ __forceinline__ void apply_dropout(float (&s)[kColumns][4], int r, uint64_t seed,
                                              int64_t bh, int row, int key0, int dropped) {
  constexpr int kKeys = 8 * kColumns;
#pragma unroll
  for (int first = 0; first < kKeys; first += 64) {
    const PhiloxBits bits = dropout_bits(seed, bh, row, (key0 + first) / 64, threadIdx.x % 4);
    const int skipped = kKeys % 64 == 0 ? 0 : key0 % 64 / 4;  // bytes of the keys before key0
#pragma unroll
    for (int i = 0; i < 16 && first + i * 4 < kKeys; ++i)
      if (bits.byte(skipped + i) < static_cast<uint32_t>(dropped))
        s[first / 8 + i / 2][2 * r + i % 2] = 0;
  }
}

}  // namespace ATTN_BACKEND::flash2
