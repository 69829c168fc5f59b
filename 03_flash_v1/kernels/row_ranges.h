// Host only: how many queries a block takes, for the launches of v7_grid to v10_exp2 and for their
// cost model.
#pragma once

#include <algorithm>

#include "attn/problem.h"

namespace attn {

// Rows of a block: so many that their O between visits stays in L2 (256 KiB), or fewer until there
// are two blocks an SM of an H200 (132).
//! [rows]
inline int64_t rows_a_block(const Problem& p, int64_t block_m) {
  int64_t rows = 64 * 1024 / p.head_dim;
  while (rows > block_m && p.batch * p.heads * ((p.seqlen_q + rows - 1) / rows) < 264) rows /= 2;
  const int64_t least = (p.seqlen_q + 65534) / 65535;  // grid.y ends there
  return std::max(rows, (least + block_m - 1) / block_m * block_m);
}
//! [rows]

}  // namespace attn
