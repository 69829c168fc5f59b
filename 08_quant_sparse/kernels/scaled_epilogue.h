// Epilogue of prefill steps, with an optional shift of lse and optional scales for the columns of
// O.
#pragma once

#include "kernels/hopper/fragments.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::hopper {

// As in chapter 06: (7) O = O / l, once; (8) store O and lse. `gLseShift` [rows of all heads], if
// given, is added to lse; `gChannels` [d], if given, multiplies the columns of O.
//! [epilogue]
template <class Element, int kHeadDim>
__device__ __forceinline__ void store_o(Element* gO, float* gLse, const WorkTile& work,
                                        int64_t row_stride, const float (&o)[kHeadDim / 8][4],
                                        const float (&row_max)[2], float (&row_sum)[2],
                                        const float* gLseShift,
                                        const float* gChannels = nullptr) {
  const bool upper = thread_index() % 2 != 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] = quad_sum(row_sum[r]);
    // A fully masked row has O = 0. Every other row has a P of about 1, or a NaN.
    const bool none = row_sum[r] == 0;
    const float factor = none ? 0 : __fdividef(1, row_sum[r]);
    const int row = first_row() + 8 * r;
    const bool exists = work.row0 + row < work.seqlen_q;
    Element* const gRow =
        gO + work.o + row * row_stride + (upper ? 8 : 0) + thread_index() / 2 % 2 * 4;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 2) {
      float2 of_even = make_float2(factor, factor), of_odd = of_even;
      if (gChannels != nullptr) {
        const float2 a = *reinterpret_cast<const float2*>(gChannels + 8 * n + quad_col());
        const float2 b = *reinterpret_cast<const float2*>(gChannels + 8 * n + 8 + quad_col());
        of_even.x *= a.x, of_even.y *= a.y, of_odd.x *= b.x, of_odd.y *= b.y;
      }
      const uint32_t even =
          pack2<Element>(o[n][2 * r] * of_even.x, o[n][2 * r + 1] * of_even.y);
      const uint32_t odd =
          pack2<Element>(o[n + 1][2 * r] * of_odd.x, o[n + 1][2 * r + 1] * of_odd.y);
      const uint32_t got = __shfl_xor_sync(~0u, upper ? even : odd, 1);
      if (exists)
        *reinterpret_cast<uint2*>(gRow + 8 * n) =
            upper ? make_uint2(got, odd) : make_uint2(even, got);
    }
    if (quad_col() == 0 && exists) {
      const float shift = gLseShift == nullptr ? 0 : gLseShift[work.lse + row];
      gLse[work.lse + row] = none ? -INFINITY : shift + kLn2 * (row_max[r] + __log2f(row_sum[r]));
    }
  }
}
//! [epilogue]

}  // namespace ATTN_BACKEND::hopper
