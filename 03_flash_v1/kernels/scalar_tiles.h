// Tile sizes of v1_scalar, for its launches and its cost model.
#pragma once

#include <algorithm>
#include <cstddef>

namespace attn {

// Line 1 of Algorithm 1: tile sizes from M, the floats that fit on the chip.
struct ScalarTiles {
  int block_m, block_n;  // B_r, B_c
  int stride;            // row stride in floats, odd so that a column hits all banks
  ScalarTiles(int floats, int d) : block_n(std::max(1, floats / (4 * d))), stride(d + 1) {
    block_m = std::min(block_n, d);
  }
  // sK, sV [block_n, d], sQ, sO [block_m, d], sS [block_m, block_n], then one float per row.
  std::size_t bytes() const {
    return sizeof(float) * (std::size_t(2 * block_n + 2 * block_m) * stride +
                            std::size_t(block_m) * (block_n + 1) + std::size_t(block_m));
  }
};

}  // namespace attn
