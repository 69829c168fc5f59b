// Rows per block of v12_more_rows.
#pragma once

#include "attn/problem.h"

namespace attn::splits {

// 16-row MMA tiles per block: 1, 2 or 4, as many as the rows of a K/V head need.
inline int row_tiles_of_a_block(const Problem& p) {
  const int64_t rows = p.group() * p.seqlen_q;
  return rows <= 16 ? 1 : rows <= 32 ? 2 : 4;
}

}  // namespace attn::splits
