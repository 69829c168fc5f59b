// Window search (Sliding Tile Attention, arXiv 2502.04507, section 3.3): for each head the smallest
// sliding tile window whose output is close enough to full attention.
#pragma once

#include <string>
#include <vector>

#include "attn/sliding_tiles.h"
#include "attn/tensor.h"

namespace attn {

/// A canvas, its tiles, and the error bound: the relative L1 distance of O from full attention.
struct WindowSearch {
  Sides canvas, tile;
  double bound = 0.05;
  int64_t every = 1;  ///< evaluate every n-th query of a head
};

/// The result for one head.
struct HeadWindow {
  Sides window;    ///< in tokens
  double density;  ///< share of the tiles of S that are computed
  double error;  ///< relative L1, over the evaluated queries
};

/// The windows that `--mask sta:` accepts: an odd number of tiles per side, or all; smallest first.
std::vector<Sides> windows_of(const WindowSearch&);

/// For each query head, the first of windows_of() whose error is within the bound. One pass over a
// head's scores evaluates all windows, because each is a sum of the same per-tile parts.
std::vector<HeadWindow> search_windows(const Problem&, const HostTensors& inputs,
                                       const WindowSearch&);

/// The windows as an option: "--mask sta:CANVAS,TILE,WINDOW,...".
std::string mask_option(const WindowSearch&, const std::vector<HeadWindow>&);

/// `08_quant_sparse --windows`: the search on heads of a field (check/field.h), printed as a table.
int windows_command(const std::vector<std::string>& arguments);

}  // namespace attn
