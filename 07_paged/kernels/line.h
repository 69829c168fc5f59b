// The plan of v6 in closed form: the positions of row blocks on a line, and the work tile of a
// block. Shared by the planning kernel and the host.
#pragma once

#include "kernels/decode/keys.h"
#include "kernels/work.h"

namespace ATTN_BACKEND::paged {
using namespace attn;

// All row blocks form one line, each with its price and then its tiles. Block n owns
// [n length, (n + 1) length) of it. A cut row block pays its price again in each further block, so
// a block costs at most length + kPieceTiles. Returns work tile `part` of a row block that begins
// at `start`; `first_part` is the block that owns its first tile.
//! [line]
__device__ __forceinline__ plans::WorkTile piece_on_line(int row_block, int start, int tiles,
                                                         int length, int part) {
  const int begin = start + plans::kPieceTiles, first_block = begin / length;
  const int num_parts = (begin + tiles - 1) / length - first_block + 1;
  const int from = max(begin, (first_block + part) * length);
  const int to = min(begin + tiles, (first_block + part + 1) * length);
  return {row_block, from - begin, to - from, part, num_parts, first_block};
}
// Index of partial result n of a row block. A block has at most one work tile whose row block
// begins earlier and one whose row block continues later, so two indices per block suffice.
__device__ __forceinline__ int64_t place_on_line(int first_block, int n) {
  return 2 * int64_t{first_block + n} + (n == 0);
}
//! [line]

}  // namespace ATTN_BACKEND::paged
