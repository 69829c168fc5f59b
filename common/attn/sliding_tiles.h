/// \file
/// Windows of tiles over a canvas of three dimensions, as Sliding Tile Attention has them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "attn/mask.h"

namespace attn {

/// Sides of a canvas, of a tile or of a window, in tokens: time, height, width.
using Sides = std::array<int64_t, 3>;

/// Tokens of a canvas lie tile after tile, those of a tile one after the other, and text behind
/// them. A tile of queries sees the window of tiles around it, which stays inside the canvas at its
/// edges (arXiv 2502.04507, section 3); text sees all, and all see it. Windows move by tiles, so
/// that a tile is seen whole or not at all: a mask of blocks.
class SlidingTiles : public BlockMask {
 public:
  /// `windows`: one for each head. Throws InputError where sides do not divide each other, or a
  /// window has neither an odd number of tiles nor all.
  SlidingTiles(const Sides& canvas, const Sides& tile, const std::vector<Sides>& windows,
               int64_t text);
  void fits(const Problem&) const override;
  std::string text() const override { return name_; }
  /// `tile_windows` [1, 1, Hq, 3], int32: the windows in tiles.
  std::vector<HostTensor> tensors() const override;

  const Sides& canvas_tiles() const { return canvas_tiles_; }

 private:
  Sides canvas_tiles_;
  std::vector<Sides> windows_;  // in tiles
  int64_t tokens_;
  std::string name_;
};

}  // namespace attn
