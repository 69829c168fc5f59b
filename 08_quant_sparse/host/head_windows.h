// Head specialisation (Sliding Tile Attention, arXiv 2502.04507, section 3.3): for each head the
// smallest window of tiles that its attention does not leave.
#pragma once

#include <string>
#include <vector>

#include "attn/sliding_tiles.h"
#include "attn/tensor.h"

namespace attn {

/// A canvas, tiles of it, and how much of O may be missing: the relative L1 distance to attention
/// to all keys.
struct WindowSearch {
  Sides canvas, tile;
  double bound = 0.05;
  int64_t every = 1;  ///< queries that are looked at: each so-manieth of a head
};

/// What is found for a head.
struct HeadWindow {
  Sides window;    ///< in tokens
  double density;  ///< of the tiles of S that are computed
  double error;    ///< relative L1, of the queries that are looked at
};

/// Sides of a window that `--mask sta:` takes: an odd number of tiles each, or all; the smallest
/// first.
std::vector<Sides> windows_of(const WindowSearch&);

/// For each query head of a problem the first of windows_of() whose error is at most the bound. All
/// windows of a head are tried in one pass over its scores, since each is a sum of the same parts:
/// those of single tiles.
std::vector<HeadWindow> search_windows(const Problem&, const HostTensors& inputs,
                                       const WindowSearch&);

/// The windows as an option: "--mask sta:CANVAS,TILE,WINDOW,...".
std::string mask_option(const WindowSearch&, const std::vector<HeadWindow>&);

/// `08_quant_sparse --windows`: the search on heads of a field (check/field.h), and its table.
int windows_command(const std::vector<std::string>& arguments);

}  // namespace attn
