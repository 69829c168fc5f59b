// Rotary embedding (RoPE) of a row: rotates each column pair (c, c + d/2) by the angle of c at the
// row's position. Angles come from a table.
#pragma once

#include "attn/kernel.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::paged {
using namespace attn;

// x: columns c to c + 7; y: columns c + d/2 to c + d/2 + 7. Rotated by the angles of c to c + 7.
//! [rotate]
template <class Element>
__device__ __forceinline__ void rotate(uint4& x, uint4& y, const float4* cosine,
                                       const float4* sine) {
  const uint32_t low[4] = {x.x, x.y, x.z, x.w}, high[4] = {y.x, y.y, y.z, y.w};
  uint32_t a[4], b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 cosines = cosine[i / 2], sines = sine[i / 2];
    const float c0 = i % 2 ? cosines.z : cosines.x, c1 = i % 2 ? cosines.w : cosines.y;
    const float s0 = i % 2 ? sines.z : sines.x, s1 = i % 2 ? sines.w : sines.y;
    const float u0 = unpack<Element>(low[i], 0), u1 = unpack<Element>(low[i], 1);
    const float v0 = unpack<Element>(high[i], 0), v1 = unpack<Element>(high[i], 1);
    a[i] = pack2<Element>(u0 * c0 - v0 * s0, u1 * c1 - v1 * s1);
    b[i] = pack2<Element>(v0 * c0 + u0 * s0, v1 * c1 + u1 * s1);
  }
  x = {a[0], a[1], a[2], a[3]}, y = {b[0], b[1], b[2], b[3]};
}
//! [rotate]

}  // namespace ATTN_BACKEND::paged
