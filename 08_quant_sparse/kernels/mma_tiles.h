// Tiles of the prefill step for sm_80 in shared memory, and what the lanes of a warp do with their
// parts of S: as chapter 04's last steps have it, from which that step comes.
//
// An accumulator lies as drawn in ptx/mma.h: a lane has, of 8 columns, columns 2 (lane % 4) and the
// next one, of rows lane / 4 and lane / 4 + 8.
#pragma once

#include "attn/kernel.h"
#include "emulator/warp_access.h"
#include "kernels/hopper/fragments.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Where the rows of a head lie: elements before the first one, and how many there are.
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

// How many 16-byte chunks of a row of 16-bit columns change places. Two codes of int8 are one such
// column: a row of d codes lies as one of d / 2.
template <int kColumns>
constexpr int kSpanOf = kColumns % 64 == 0 ? 8 : 4;

// The swizzled offset of element (row, col) of a tile [rows, kColumns]: its 16-byte chunks change
// places, so that those of 8 rows in one column lie in 8 groups of 4 banks.
//! [mma_swizzle]
template <int kColumns>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  const int phase = kColumns % 64 == 0 ? row % 8 : row / 2 % 4;
  return row * kColumns + ((col / 8) ^ phase) * 8 + col % 8;
}
// The byte offset `cols` columns further in the same row, from an even column of chunks.
template <int kSwizzleChunks>
__host__ __device__ constexpr int swizzle_advance(int offset, int cols) {
  return (offset ^ (2 * (cols % (8 * kSwizzleChunks)))) +
         cols / (8 * kSwizzleChunks) * (16 * kSwizzleChunks);
}
//! [mma_swizzle]

// The very addresses of the three ldmatrix: Q and V, K; and those of O.
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
    for (int l = 0; l < 32; ++l)  // swizzle_advance gives the very same addresses
      if (swizzle_advance<kSpanOf<kColumns>>(2 * swizzled_offset<kColumns>(l % 16, l / 16 * 8),
                                             col) != q_or_v(l))
        return false;
  }
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<128>() &&
              free_of_conflicts<256>());

// Keys that a row does not see get -inf. `own`: where this lane's first row is among the keys,
// counted from the lane's first key; `left`: how many keys there are from the first column on.
// What a row sees shifts with it. One loop for each edge: both in one take registers that are not
// there.
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
