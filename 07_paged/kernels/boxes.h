// Boxes of TMA that a tile of keys consists of, in v15, v16 and v17: what their
// launches use and the table refuses by.
#pragma once

#include <numeric>

#include "kernels/splits.h"

namespace attn {
int64_t num_pages_of(const Problem&);  // of the pool, as paged.h has it
}

namespace attn::splits {

// Rows of a page that lie side by side in a tile of keys, wherever it begins: a box. TMA's swizzle
// goes by atoms of 8 rows.
constexpr int64_t kAtomRows = 8;
inline int64_t box_rows(const Problem& p) {
  return std::gcd(page_size_of(p), int64_t{tile_keys(p.head_dim)});
}

}  // namespace attn::splits
