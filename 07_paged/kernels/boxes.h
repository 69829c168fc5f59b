// TMA boxes of a KV tile in v15, v16 and v17: used by the launches, and by the chapter's table to
// refuse page sizes.
#pragma once

#include <numeric>

#include "kernels/splits.h"

namespace attn {
int64_t num_pages_of(const Problem&);  // of the pool, see paged.h
}

namespace attn::splits {

// Rows per box: the rows of a page that are contiguous in a KV tile, for any tile start. TMA's
// swizzle works on atoms of 8 rows.
constexpr int64_t kAtomRows = 8;
inline int64_t box_rows(const Problem& p) {
  return std::gcd(page_size_of(p), int64_t{tile_keys(p.head_dim)});
}

}  // namespace attn::splits
