// d9's products with fp16 tokens, 16 at a time. The operands are in fragment order in global memory
// (quantise_groups.h).
#pragma once

#include "kernels/quantise_groups.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;

// S^T += K Q^T of keys quad_row and quad_row + 8. `g`: the first key's row.
//! [newest_scores]
template <class Config>
__device__ __forceinline__ void newest_scores(float (&s)[4],
                                              const uint32_t (&q)[Config::kHeadDim / 32][4],
                                              const __half* g) {
  const int quad_row = threadIdx.x % 32 / 4, quad_col = threadIdx.x % 4;
  const auto eight = [&](int row, int chunk) {
    return *reinterpret_cast<const uint4*>(g + row * Config::kHeadDim + 32 * chunk + 8 * quad_col);
  };
#pragma unroll
  for (int chunk = 0; chunk < Config::kHeadDim / 32; ++chunk) {
    const uint4 low = eight(quad_row, chunk), high = eight(quad_row + 8, chunk);
    const uint32_t(&b)[4] = q[chunk];
    mma_m16n8k16<__half>(s, {low.x, high.x, low.y, high.y}, {b[0], b[1]}, s);
    mma_m16n8k16<__half>(s, {low.z, high.z, low.w, high.w}, {b[2], b[3]}, s);
  }
}
//! [newest_scores]

// O^T += V^T P^T. `g`: the words of the first two keys. A lane has four columns of 32, as with
// codes.
//! [newest_output]
template <class Config>
__device__ __forceinline__ void newest_output(float (&o)[Config::kHeadDim / 16][4],
                                              const float (&p)[4], const __half* g) {
  const int quad_row = threadIdx.x % 32 / 4, quad_col = threadIdx.x % 4;
  const auto four = [&](int pair, int chunk) {
    return *reinterpret_cast<const uint4*>(
        g + 2 * (pair * Config::kHeadDim + 32 * chunk + 4 * quad_row));
  };
  const uint32_t b[2] = {movmatrix_trans(pack2<__half>(p[0], p[1])),
                         movmatrix_trans(pack2<__half>(p[2], p[3]))};
#pragma unroll
  for (int chunk = 0; chunk < Config::kHeadDim / 32; ++chunk) {
    const uint4 low = four(quad_col, chunk),
                high = four(quad_col + 4, chunk);  // keys up to 7; from 8 on
    float(&tile)[4] = o[2 * chunk];
    float(&next)[4] = o[2 * chunk + 1];
    mma_m16n8k16<__half>(tile, {low.x, low.y, high.x, high.y}, b, tile);
    mma_m16n8k16<__half>(next, {low.z, low.w, high.z, high.w}, b, next);
  }
}
//! [newest_output]

}  // namespace ATTN_BACKEND::flash_decoding
