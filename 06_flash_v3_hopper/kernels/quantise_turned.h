// The pass of f7 and f8: a rotary embedding of Q and K, fused into quantise_tiles.h.
#pragma once

#include <algorithm>

#include "kernels/quantise_chunks.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Angles of a tile's rows. Each row has 16 bytes of padding, so that the eight lanes of two rows
// that read 16 bytes each in one phase hit disjoint banks.
//! [angles]
template <int kHeadDim>
struct RotaryStorage {
  static constexpr int kStride = kHeadDim + 4;
  alignas(16) float sAngles[kScaleRows * kStride];
  ColumnSigns<kHeadDim> signs;
  TileMaxima<kHeadDim> sMax;
  ATTN_MEMBERS(RotaryStorage, sAngles, signs, sMax)
};
// f5's random signs are applied to the bf16 words before a pair is turned. If (a, b) is turned to
// (a', b'), then (s a, r b) is turned to (s a', r b') by the same angle with its sine multiplied by
// s r. These sines are stored here, once for all heads of the block.
template <int kHeadDim>
__device__ __forceinline__ void load_angles(RotaryStorage<kHeadDim>& smem, const float* g,
                                            int rows) {
  constexpr int kHalf = kHeadDim / 2, kFours = kHeadDim / 4;  // per row
  const int column = static_cast<int>(threadIdx.x) % kFours * 4;
  float sign[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sign[i] = column < kHalf ? 1 : random_sign(column + i) * random_sign(column - kHalf + i);
#pragma unroll 8  // 8 loads in flight
  for (int row = static_cast<int>(threadIdx.x) / kFours; row < kScaleRows;
       row += RowLanes<kHeadDim>::kThreads / kFours) {
    float4 x{};
    if (row < rows) x = *reinterpret_cast<const float4*>(g + int64_t{row} * kHeadDim + column);
    x.x *= sign[0], x.y *= sign[1], x.z *= sign[2], x.w *= sign[3];
    *reinterpret_cast<float4*>(smem.sAngles + row * smem.kStride + column) = x;
  }
}
//! [angles]

// H x of a turned row. Turned elements are fp32, which the bf16 MMA of quantise_tiles.h does not
// take. So all rounds are additions; the two with columns 8 and 16 apart need shuffles.
template <int kCount>
__device__ __forceinline__ void hadamard(float (&x)[kCount], int lane) {
#pragma unroll
  for (int apart = 1; apart < 8; apart *= 2) add_and_subtract(x, apart);
#pragma unroll
  for (int apart = 1; apart < 4; apart *= 2) {
    // one lane gets the sum, the other the difference
    const float sign = (lane & apart) == 0 ? 1.0f : -1.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = fmaf(sign, x[i], __shfl_xor_sync(~0u, x[i], apart));
  }
#pragma unroll
  for (int apart = 8; apart < kCount; apart *= 2) add_and_subtract(x, apart);
}

// Turns, rotates and quantises Q and K. A block processes one tile of rows in kHeads heads, which
// share the angles.
//! [fused]
template <class Pass, int kHeadDim>
__global__ void __launch_bounds__(RowLanes<kHeadDim>::kThreads, RowLanes<kHeadDim>::kBlocks)
    quantise_turned_kernel(RowsOf q, RowsOf k, RotaryAngles angles) {
  auto& smem = dynamic_shared<RotaryStorage<kHeadDim>>();
  constexpr int kPairs = RowLanes<kHeadDim>::kEights / 2;  // pairs of groups per lane
  const bool is_q = blockIdx.y == 0;
  const RowsOf t = is_q ? q : k;
  const int tile = static_cast<int>(blockIdx.x % t.tiles);
  const int head0 = static_cast<int>(blockIdx.x / t.tiles) * Pass::kHeads;
  const int heads = min(static_cast<int>(t.heads), head0 + Pass::kHeads);
  if (head0 >= heads) return;  // block-uniform
  const int row0 = tile * kScaleRows, lane = threadIdx.x % RowLanes<kHeadDim>::kLanes;
  TileOfRows next = t.tile(head0 * t.tiles + tile);
  TileBits<kHeadDim> bits;
  bits.load(t.g, next);
  smem.signs.find();
  load_angles(smem, angles.g + int64_t{(is_q ? angles.first_q : angles.first_k) + row0} * kHeadDim,
              t.rows - row0);
  __syncthreads();  // the angles are visible to all threads
  const auto turn_row = [&](float(&x)[16 * kPairs], int row) {
#pragma unroll
    for (int i = 0; i < 8 * kPairs; i += 4) {
      const float* const row_angles =
          smem.sAngles + row * smem.kStride + 8 * lane + i / 8 * 32 + i % 8;
      const float4 cosine = *reinterpret_cast<const float4*>(row_angles);
      const float4 sine = *reinterpret_cast<const float4*>(row_angles + kHeadDim / 2);
      turn(x[i], x[i + 8 * kPairs], cosine.x, sine.x);
      turn(x[i + 1], x[i + 1 + 8 * kPairs], cosine.y, sine.y);
      turn(x[i + 2], x[i + 2 + 8 * kPairs], cosine.z, sine.z);
      turn(x[i + 3], x[i + 3 + 8 * kPairs], cosine.w, sine.w);
    }
  };
#pragma unroll 1
  for (int head = head0; head < heads; ++head) {
    const TileOfRows current = next;
    TileNumbers<kHeadDim, 4> numbers;
    unpack(bits, &smem.signs, numbers);
    if (head + 1 < heads) {
      next.row0 += t.rows, next.index += t.tiles;
      bits.load(t.g, next);
    }
#pragma unroll
    for (int n = 0; n < numbers.kRows; ++n) {
      turn_row(numbers.x[n], numbers.row(n));
      hadamard(numbers.x[n], lane);
#pragma unroll
      for (float& number : numbers.x[n]) number = finite_or_nan(number);  // sums may overflow
    }
    quantise_tile(t.g8, t.gDescale, current, numbers, smem.sMax[head % 2], kHadamardNorm<kHeadDim>);
  }
}
//! [fused]

//! [launch_turned]
template <int kHeadDim>
Status quantise_turned(const Arguments& args) {
  using Pass = ChunksPass;
  const RowsOf q = rows_of(args, "q", "q"), k = rows_of(args, "k", "k");
  const auto blocks_of = [](const RowsOf& t) {
    return ceil_div(t.heads, int64_t{Pass::kHeads}) * t.tiles;
  };
  args.phase("quantise");
  return launch_kernel(quantise_turned_kernel<Pass, kHeadDim>,
                       dim3(static_cast<unsigned>(std::max(blocks_of(q), blocks_of(k))), 2),
                       dim3(RowLanes<kHeadDim>::kThreads), sizeof(RotaryStorage<kHeadDim>),
                       args.stream, q, k, RotaryAngles(args));
}
//! [launch_turned]

}  // namespace ATTN_BACKEND::hopper
