// How many rows a block of v12_more_rows has.
#pragma once

#include "attn/problem.h"

namespace attn::splits {

// MMAs of 16 rows: as many as the rows of a K/V head need, up to 4.
inline int row_tiles_of_a_block(const Problem& p) {
  const int64_t rows = p.group() * p.seqlen_q;
  return rows <= 16 ? 1 : rows <= 32 ? 2 : 4;
}

}  // namespace attn::splits
