// Compile-time check: ldmatrix reads a swizzled 16-bit tile without bank conflicts.
#pragma once

#include "emulator/warp_access.h"

namespace ATTN_BACKEND::flash1 {
using namespace attn;

// `offset(row, col)`: index of an element. Checks the addresses that the steps use: one ldmatrix
// pattern for Q and V, one for K.
template <class Offset>
constexpr bool free_of_conflicts(Offset offset, int head_dim) {
  for (int col = 0; col < head_dim; col += 16) {
    const auto q_or_v = [=](int l) { return 2 * offset(l % 16, col + l / 16 * 8); };
    const auto k = [=](int l) { return 2 * offset(l / 16 * 8 + l % 8, col + l / 8 % 2 * 8); };
    if (ldmatrix_access(q_or_v, 4).conflicts() + ldmatrix_access(k, 4).conflicts() > 0)
      return false;
  }
  return true;
}

}  // namespace ATTN_BACKEND::flash1
