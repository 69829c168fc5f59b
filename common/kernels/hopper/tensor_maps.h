// Tensor maps of Q, K and V. From chapter 06_flash_v3_hopper.
#pragma once

#include "attn/kernel.h"
#include "ptx/tma.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// A map of [heads, rows, d], or of packed [rows, heads, d]. A box is a tile of `tile_rows` rows
// with all panels of 64 columns. TMA fills rows past the end with zeros.
//! [map]
template <class Element>
Status map_of(TensorMap& map, const Element* g, const Problem& p, int64_t heads, int64_t rows,
              int tile_rows) {
  const int64_t d = p.head_dim, row_bytes = 2 * d * (p.varlen() ? heads : 1);
  const int64_t head_bytes = 2 * d * (p.varlen() ? 1 : rows);
  const int panels = static_cast<int>(d / 64);
  return make_tensor_map<4>(map, g, {64, rows, panels, heads * (p.varlen() ? 1 : p.batch)},
                            {row_bytes, 128, head_bytes}, {64, tile_rows, panels, 1},
                            Swizzle::k128);
}
//! [map]

}  // namespace ATTN_BACKEND::hopper
