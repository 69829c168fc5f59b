// XOR swizzle of a tile, as in v7_xor_addresses, shared by the later steps.
#pragma once

#include "attn/kernel.h"
#include "emulator/warp_access.h"

namespace ATTN_BACKEND::flash2 {
using namespace attn;

// XOR swizzle: offset of element (row, col) of a tile [rows, kHeadDim]. The 16-byte chunks of a row
// are permuted so that the 8 rows that ldmatrix reads at once lie in disjoint banks.
template <int kHeadDim>
__host__ __device__ constexpr int swizzled_offset(int row, int col) {
  const int phase = kHeadDim % 64 == 0 ? row % 8 : row / 2 % 4;
  return row * kHeadDim + ((col / 8) ^ phase) * 8 + col % 8;
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

// The addresses of the ldmatrix of Q and V and of K, and of the stores of O.
template <int kHeadDim>
constexpr bool free_of_conflicts() {
  constexpr int kSwizzleChunks = kHeadDim % 64 == 0 ? 8 : 4;
  for (int col = 0; col < kHeadDim; col += 16) {
    const auto q_or_v = [=](int l) {
      return 2 * swizzled_offset<kHeadDim>(l % 16, col + l / 16 * 8);
    };
    const auto k = [=](int l) {
      return 2 * swizzled_offset<kHeadDim>(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8);
    };
    const auto o = [=](int l) { return 2 * swizzled_offset<kHeadDim>(l / 4, col + 2 * (l % 4)); };
    if (ldmatrix_access(q_or_v, 4).conflicts() + ldmatrix_access(k, 4).conflicts() > 0)
      return false;
    if (shared_access(o, 4).conflicts() > 0) return false;
    for (int l = 0; l < 32; ++l)  // swizzle_advance gives the same addresses
      if (swizzle_advance<kSwizzleChunks>(2 * swizzled_offset<kHeadDim>(l % 16, l / 16 * 8), col) !=
          q_or_v(l))
        return false;
  }
  return true;
}
static_assert(free_of_conflicts<32>() && free_of_conflicts<64>() && free_of_conflicts<96>() &&
              free_of_conflicts<128>() && free_of_conflicts<192>() && free_of_conflicts<256>());

}  // namespace ATTN_BACKEND::flash2
