// Shared-memory tiles of this chapter's decode steps: the layout of their chunks, and the load of
// Q.
#pragma once

#include "attn/kernel.h"
#include "ptx/ldmatrix.h"
#include "ptx/mma.h"

namespace ATTN_BACKEND::flash_decoding {
using namespace attn;

// The swizzled offset of element (row, col) of a 16-bit tile, as in chapter 04; and of 16-byte
// chunk `chunk` of codes. A row of codes may be so short that several rows form a 128-byte line.
//! [swizzle]
template <int kHeadDim>
__device__ __forceinline__ int swizzled_offset(int row, int col) {
  return row * kHeadDim + ((col / 8) ^ (row % 8)) * 8 + col % 8;
}
template <int kRowBytes>
__device__ __forceinline__ int code_offset(int row, int chunk) {
  constexpr int kChunks = kRowBytes < 128 ? kRowBytes / 16 : 8, kRowsOfLine = 8 / kChunks;
  return row * kRowBytes + (chunk ^ (row / kRowsOfLine % kChunks)) * 16;
}
//! [swizzle]

// Q in fp16, one row per warp. It is divided by the power of 2 of its largest element, so that fp16
// keeps its significant bits; the divisor is the row's scale. The columns are in the order in which
// codes of K become operands: Codes::slot. The row sum is over the stored values.
//! [load_q]
template <class Config, class Codes, class Element>
__device__ __forceinline__ void load_q(__half* sQ, float* sQScale, float* sQSum, const Element* gQ,
                                       int count) {
  constexpr int kHeadDim = Config::kHeadDim, kOwn = ceil_div(kHeadDim, 128);
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  for (int row = warp_id; row < Config::kRows; row += Config::kNumWarps) {
    float x[kOwn][4] = {};
    float largest = 0, sum = 0;
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      const int col = 128 * c + 4 * lane_id;
      if (row >= count || col >= kHeadDim) continue;
      const uint2 four = *reinterpret_cast<const uint2*>(gQ + int64_t{row} * kHeadDim + col);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[c][i] = unpack<Element>(i < 2 ? four.x : four.y, i % 2);
        largest = fmaxf(largest, fabsf(x[c][i]));
      }
    }
    for (int mask = 16; mask > 0; mask /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
    constexpr unsigned kExponent = 0x7F800000, kLeast = 0x00800000, kMost = 0x7E800000;
    const unsigned exponent = min(max(__float_as_uint(largest) & kExponent, kLeast), kMost);
    const float scale = __uint_as_float(0x7F000000u - exponent);
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      const int col = 128 * c + 4 * lane_id;
      if (col >= kHeadDim) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const __half half = from_float<__half>(x[c][i] * scale);
        sQ[swizzled_offset<kHeadDim>(row, Codes::slot(col + i))] = half;
        sum += to_float(half);
      }
    }
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (lane_id == 0) sQScale[row] = __uint_as_float(exponent), sQSum[row] = sum;
  }
}
//! [load_q]

// 16 columns of Q as the A operand: from registers, or from shared memory if there are too many to
// keep.
//! [q_stride]
template <class Config>
__device__ __forceinline__ void load_q_step(uint32_t (&q)[4], const __half* sQ, int step) {
  const int lane_id = threadIdx.x % 32;
  ldmatrix_x4(q, sQ + swizzled_offset<Config::kHeadDim>(lane_id % 16,
                                                        16 * step + lane_id / 16 * 8));
}
template <class Config>
__device__ __forceinline__ const uint32_t (&q_of(uint32_t (&loaded)[4],
                                                 const uint32_t (&q)[Config::kQSteps][4],
                                                 const __half* sQ, int step))[4] {
  if constexpr (Config::kQSteps > 1) return q[step];
  load_q_step<Config>(loaded, sQ, step);
  return loaded;
}
//! [q_stride]

}  // namespace ATTN_BACKEND::flash_decoding
