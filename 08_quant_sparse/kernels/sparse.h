// The block-sparse steps: what the host knows of their tiles and lists.
#pragma once

#include <cstdint>
#include <vector>

#include "attn/mask.h"
#include "attn/sliding_tiles.h"
#include "attn/step.h"

namespace attn {

/// Queries and keys per tile: mask blocks are multiples of them.
constexpr int kSparseBlockM = 128;
constexpr int sparse_block_n(int64_t head_dim) { return head_dim == 256 ? 64 : 128; }

/// The block mask of a problem, its column intervals, its sliding tile windows; null if it has
/// none.
inline const BlockMask* blocks_of(const Problem& p) {
  return dynamic_cast<const BlockMask*>(p.mask.get());
}
inline const ColumnIntervals* columns_of(const Problem& p) {
  return dynamic_cast<const ColumnIntervals*>(p.mask.get());
}
inline const SlidingTiles* tiles_of_canvas(const Problem& p) {
  return dynamic_cast<const SlidingTiles*>(p.mask.get());
}
/// Intervals per column.
inline int intervals_of(const Problem& p) { return static_cast<int>(columns_of(p)->shape()[2]); }

/// Query tiles per head.
inline int64_t tiles_of_queries(const Problem& p) {
  return (p.seqlen_q + kSparseBlockM - 1) / kSparseBlockM;
}

/// Heads, over all sequences, that have lists of their own.
int64_t lists_of(const Problem&);

/// Strides between the lists of two sequences and of two heads, in lists; 0 if they share one.
struct ListStrides {
  int batch = 0, head = 0;
};
ListStrides list_strides(const Problem&);

}  // namespace attn
