// A plan in closed form: where row blocks lie on a line, and which piece of it a block has. For the
// kernel that plans and for the same plan on the host.
#pragma once

#include "kernels/decode/keys.h"
#include "kernels/work.h"

namespace ATTN_BACKEND::paged {
using namespace attn;

// All row blocks lie on a line one behind the other, each its price and then its tiles, and block n
// has [n length, (n + 1) length) of it. A row block that is cut pays its price once more in each
// block behind the cut: so a block costs at most length + kPieceTiles. This is piece `part` of a
// row block that begins at `start`; `first_part` is the block that has its first tile.
//! [line]
__device__ __forceinline__ plans::WorkTile piece_on_line(int row_block, int start, int tiles,
                                                     int length, int part) {
  const int begin = start + plans::kPieceTiles, first_block = begin / length;
  const int num_parts = (begin + tiles - 1) / length - first_block + 1;
  const int from = max(begin, (first_block + part) * length);
  const int to = min(begin + tiles, (first_block + part + 1) * length);
  return {row_block, from - begin, to - from, part, num_parts, first_block};
}
// A block has at most one piece that began before it and one that goes on behind it, so that two
// places for parts are enough, wherever they begin: part n of a row block lies here.
__device__ __forceinline__ int64_t place_on_line(int first_block, int n) {
  return 2 * int64_t{first_block + n} + (n == 0);
}
//! [line]

}  // namespace ATTN_BACKEND::paged
