// Which blocks of keys a tile of queries visits, where that is no range: a list for each tile.
#pragma once

#include "kernels/sparse.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// One list for each tile of queries of each head; a stride of 0: one for all heads, or sequences.
struct BlockLists {
  const BlockList* gVisits;  // [B or 1, Hq or 1, tiles of queries]
  const int* gBlocks;     // of all tiles, one after the other
  int batch_stride, head_stride;
};

// A tile without blocks visits block 0, of which nothing is seen.
template <class Config>
__device__ __forceinline__ WorkTile listed_work_of(const Shape& shape, TileOrder::Tile tile,
                                               const BlockLists& lists) {
  WorkTile work = work_of<Config>(shape, tile);
  const int list = tile.bh / shape.heads * lists.batch_stride +
                   tile.bh % shape.heads * lists.head_stride + tile.row0 / Config::kBlockM;
  work.visits = lists.gVisits[list];
  work.last_key = shape.seqlen_k - 1;
  if (work.visits.count() == 0) work.last_key = -1, work.kv_range = {0, 0, 0, 1};
  return work;
}

// What the intervals of a block of keys have in common.
//! [classify]
struct Bounds {
  int begin_min, begin_max, end_min, end_max;
};
enum BlockClass { kHidden, kUnmasked, kMasked };
//! [ex08c]
// Of rows [row0, last_row] and a block of keys, whose bounds are those of all its columns.
__host__ __device__ inline BlockClass classify(const Bounds* bounds, int count, int row0,
                                               int last_row) {
  BlockClass is = kUnmasked;
  for (int i = 0; i < count; ++i) {
    const Bounds& b = bounds[i];
    if (b.begin_max <= row0 && b.end_min > last_row) return kHidden;  // from all rows
    if (b.begin_min <= last_row && b.end_max > row0) is = kMasked;    // perhaps from some
  }
  return is;
}
//! [ex08c]
//! [classify]

}  // namespace ATTN_BACKEND::hopper
