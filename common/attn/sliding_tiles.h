/// \file
/// Sliding Tile Attention (STA): windows of tiles over a three-dimensional canvas.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "attn/mask.h"

namespace attn {

/// Extents of a canvas, tile or window in tokens: time, height, width.
using Sides = std::array<int64_t, 3>;

/// Tokens of a canvas are stored tile by tile; text tokens follow. A query tile attends to a window
/// of tiles around it, which is shifted to stay inside the canvas (arXiv 2502.04507, section 3).
/// Text attends to all tokens, and all attend to text. Windows are multiples of tiles, so a tile is
/// either fully visible or fully masked: a block mask.
class SlidingTiles : public BlockMask {
 public:
  /// `windows`: one per head. Throws InputError if the extents do not divide each other, or if a
  /// window has neither an odd number of tiles nor all of them.
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
