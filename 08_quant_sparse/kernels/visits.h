// Block lists: the key blocks that a query tile visits, where they form no range.
#pragma once

#include "kernels/sparse.h"
#include "kernels/tiles.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// One list per query tile of each head; a stride of 0: shared by all heads, or sequences.
struct BlockLists {
  const BlockList* gVisits;  // [B or 1, Hq or 1, query tiles]
  const int* gBlocks;  // of all tiles, concatenated
  int batch_stride, head_stride;
};

// A tile with an empty list visits block 0, fully masked.
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

// Bounds over the intervals of a key block.
//! [classify]
struct Bounds {
  int begin_min, begin_max, end_min, end_max;
};
enum BlockClass { kHidden, kUnmasked, kMasked };
//! [ex08c]
// Classifies a key block for rows [row0, last_row] by the bounds over all its columns.
__host__ __device__ inline BlockClass classify(const Bounds* bounds, int count, int row0,
                                               int last_row) {
  BlockClass is = kUnmasked;
  for (int i = 0; i < count; ++i) {
    const Bounds& b = bounds[i];
    if (b.begin_max <= row0 && b.end_min > last_row) return kHidden;  // for all rows
    if (b.begin_min <= last_row && b.end_max > row0) is = kMasked;  // perhaps for some
  }
  return is;
}
//! [ex08c]
//! [classify]

}  // namespace ATTN_BACKEND::hopper
