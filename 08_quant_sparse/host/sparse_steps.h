// The block-sparse steps, and the lists that the host makes for them.
#pragma once

#include <vector>

#include "attn/step.h"
#include "kernels/sparse.h"

namespace attn {

/// Step::plan of s1: `visits` [lists, query tiles, 3], the BlockList of each tile, and `visited`,
// the key blocks of all tiles.
HostTensors visit_lists(const Problem&, const HostTensors&);

/// Tiles of S that are computed, over all heads.
double visited_tiles(const Problem&);

/// The block-sparse steps of operation forward.
std::vector<Step> sparse_steps();

}  // namespace attn
