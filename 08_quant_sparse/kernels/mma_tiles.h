// Shared-memory tiles of the sm_80 prefill step, and what the lanes of a warp do with their parts
// of S. As in chapter 04's last steps.
//
// The accumulator layout is drawn in ptx/mma.h: of 8 columns, a lane has columns 2 (lane % 4) and
// the next, in rows lane / 4 and lane / 4 + 8.
#pragma once

#include "attn/kernel.h"
#include "emulator/warp_access.h"
#include "kernels/hopper/fragments.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Location of the rows of a head: the offset of the first row in elements, and the number of rows.
struct Sequence {
  int64_t q, kv, lse;  // of Q and O, of K and V, of lse
  int seqlen_q, seqlen_k;
};
__device__ __forceinline__ Sequence sequence_of(const Shape& shape, int bh, int head_dim) {
  const int b = bh / shape.heads, hkv = bh % shape.heads / (shape.heads / shape.kv_heads);
  return {int64_t{bh} * shape.seqlen_q * head_dim,
          (int64_t{b} * shape.kv_heads + hkv) * shape.seqlen_k * head_dim,
          int64_t{bh} * shape.seqlen_q, shape.seqlen_q, shape.seqlen_k};
}

// Number of 16-byte chunks of a 16-bit row that the swizzle permutes. Two int8 codes count as one
// 16-bit column: a row of d codes has the layout of a row of d / 2.
template <int kColumns>
constexpr int kSpanOf = kColumns % 64 == 0 ? 8 : 4;

// XOR swizzle: the offset of element (row, col) of a tile [rows, kColumns]. The 8 rows of an
// ldmatrix phase hit disjoint banks.
//! [mma_swizzle]
template <int kColumns>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  const int phase = kColumns % 64 == 0 ? row % 8 : row / 2 % 4;
  return row * kColumns + ((col / 8) ^ phase) * 8 + col % 8;
}
// Byte offset `cols` columns further along the row: XOR within a span of kSwizzleChunks chunks,
// addition from span to span. Valid because bits 4 to 6 of a row's start are 0 (4 and 5 if
// kSwizzleChunks is 4), for an `offset` in chunk column 0, and in column 1 if `cols` is a multiple
// of 16.
template <int kSwizzleChunks>
__host__ __device__ constexpr int swizzle_advance(int offset, int cols) {
  return (offset ^ (2 * (cols % (8 * kSwizzleChunks)))) +
         cols / (8 * kSwizzleChunks) * (16 * kSwizzleChunks);
}
//! [mma_swizzle]

// The exact addresses of the ldmatrix of Q and V, of K, and of O.
template <int kColumns>
constexpr bool free_of_conflicts() {
  for (int col = 0; col < kColumns; col += 16) {
    const auto q_or_v = [=](int l) {
      return 2 * swizzled_offset<kColumns>(l % 16, col + l / 16 * 8);
    };
    const auto k = [=](int l) {
      return 2 * swizzled_offset<kColumns>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8);
    };
    const auto o = [=](int l) { return 2 * swizzled_offset<kColumns>(l / 4, col + 2 * (l % 4)); };
    if (ldmatrix_access(q_or_v, 4).conflicts() + ldmatrix_access(k, 4).conflicts() > 0)
      return false;
    if (shared_access(o, 4).conflicts() > 0) return false;
    for (int l = 0; l < 32; ++l)  // swizzle_advance gives exactly the same addresses
      if (swizzle_advance<kSpanOf<kColumns>>(2 * swizzled_offset<kColumns>(l % 16, l / 16 * 8),
                                             col) != q_or_v(l))
        return false;
  }
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<128>() &&
              free_of_conflicts<256>());

// Sets masked scores to -inf. `row_minus_col`: diagonal of this lane's first row, relative to its
// first key; `left`: number of keys from the first column on. The bounds shift with the row. One
// loop per edge: one loop for both would spill registers.
//! [mma_mask]
template <int kTiles, int kColumns>
__device__ __forceinline__ void apply_mask(float (&s)[kTiles][kColumns][4], const Shape& shape,
                                           int row_minus_col, int left) {
  const auto mask_where = [&](auto unseen) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (unseen(8 * n + i % 2, 16 * m + 8 * (i / 2))) s[m][n][i] = -INFINITY;
  };
  const int last = row_minus_col + shape.window_right, first = row_minus_col - shape.window_left;
  if (shape.window_right < Shape::kNoWindow)
    mask_where([&](int key, int row) { return key - row > last; });
  if (shape.window_left < Shape::kNoWindow)
    mask_where([&](int key, int row) { return key - row < first; });
  if (const int keys = left - thread_index() % 4 * 2; left < 8 * kColumns)
    mask_where([&](int key, int) { return key >= keys; });
}
//! [mma_mask]

}  // namespace ATTN_BACKEND::hopper
