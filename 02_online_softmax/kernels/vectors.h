// 16-byte vectors of a row: load, store and normalise. Used from v3_warp on.
#pragma once

#include "attn/kernel.h"
#include "ptx/mma.h"  // pack2, unpack

namespace ATTN_BACKEND::softmax_vectors {
using namespace attn;

// 16 bytes of a row in registers.
template <class Element>
struct Vector {
  static constexpr int kSize = 16 / sizeof(Element);
  uint4 bits;

  __device__ __forceinline__ void to_floats(float (&x)[kSize]) const {
    const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if constexpr (kSize == 4)
        x[i] = __uint_as_float(word[i]);
      else
        x[i] = unpack<Element>(word[i / 2], i % 2);
    }
  }
  __device__ __forceinline__ static Vector from_floats(const float (&x)[kSize]) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kSize == 4)
        word[i] = __float_as_uint(x[i]);
      else
        word[i] = pack2<Element>(x[2 * i], x[2 * i + 1]);
    }
    return {make_uint4(word[0], word[1], word[2], word[3])};
  }
};
template <class Element>
__device__ __forceinline__ Vector<Element> load(const Element* g) {
  return {*reinterpret_cast<const uint4*>(g)};
}
template <class Element>
__device__ __forceinline__ void store(Element* g, const Vector<Element>& v) {
  *reinterpret_cast<uint4*>(g) = v.bits;
}

// exp(x - max) / sum for each element of a vector.
template <class Element>
__device__ __forceinline__ Vector<Element> quotients(const Vector<Element>& vector, float max,
                                                     float inverse_sum) {
  float x[Vector<Element>::kSize];
  vector.to_floats(x);
#pragma unroll
  for (float& value : x) value = __expf(value - max) * inverse_sum;
  return Vector<Element>::from_floats(x);
}
template <class Element>
__device__ __forceinline__ Element quotient(Element x, float max, float inverse_sum) {
  return from_float<Element>(__expf(to_float(x) - max) * inverse_sum);
}

}  // namespace ATTN_BACKEND::softmax_vectors
