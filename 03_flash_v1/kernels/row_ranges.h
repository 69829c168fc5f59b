// Host only: queries per block, for the launches of v7_grid to v10_exp2 and their cost model.
#pragma once

#include <algorithm>

#include "attn/problem.h"

namespace attn {

// Rows per block: fp32 O of at most 256 KiB, and fewer rows until there are two blocks per SM of an
// H200 (132 SMs).
//! [rows]
inline int64_t rows_a_block(const Problem& p, int64_t block_m) {
  int64_t rows = 64 * 1024 / p.head_dim;
  while (rows > block_m && p.batch * p.heads * ((p.seqlen_q + rows - 1) / rows) < 264) rows /= 2;
  const int64_t least = (p.seqlen_q + 65534) / 65535;  // limit of gridDim.y
  return std::max(rows, (least + block_m - 1) / block_m * block_m);
}
//! [rows]

}  // namespace attn
