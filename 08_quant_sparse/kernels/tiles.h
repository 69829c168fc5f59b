// Description of a query tile. The same for all prefill steps of this chapter.
#pragma once

#include "attn/kernel.h"
#include "kernels/hopper/tile_order.h"

namespace ATTN_BACKEND::hopper {
using namespace attn;

// Block list of a tile in a sparse step: positions in the list of all tiles. Blocks from `first` on
// need no mask, those from `masked` on need the element mask; the list ends at `end`.
//! [visits]
struct BlockList {
  int first, masked, end;
  __host__ __device__ int count() const { return end - first; }
};
//! [visits]

// Work tile of a block: some rows of one head, and their visible key blocks.
//! [work]
struct WorkTile {
  int row0 = -1;  // first row in its sequence; -1: end of work
  int seqlen_q, seqlen_k;
  int q_head, kv_head;  // counted over the batch
  KvBlockRange kv_range;
  int64_t o, lse;  // offsets of the first row, in elements
  // Sparse steps visit these blocks instead of `kv_range`; the last key, or -1.
  BlockList visits = {};
  int last_key = -1;
};
template <class Config>
__device__ __forceinline__ WorkTile work_of(const Shape& shape, TileOrder::Tile tile) {
  const auto [bh, row0] = tile;
  const int64_t row = int64_t{bh} * shape.seqlen_q + row0;  // row index in [B, Hq, seqlen_q]
  return {
      row0,
      shape.seqlen_q,
      shape.seqlen_k,
      bh,
      bh / (shape.heads / shape.kv_heads),
      kv_block_range(shape, shape.seqlen_q, shape.seqlen_k, row0, Config::kBlockM, Config::kBlockN),
      row * Config::kHeadDim,
      row};
}
//! [work]

}  // namespace ATTN_BACKEND::hopper
