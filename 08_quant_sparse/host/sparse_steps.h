// The steps that skip blocks of keys, and the lists that the host makes for them.
#pragma once

#include <vector>

#include "attn/step.h"
#include "kernels/sparse.h"

namespace attn {

/// Step::plan of s1: `visits` [lists, tiles of queries, 3], struct Visits of each tile, and
/// `visited`, the blocks of keys of all tiles.
HostTensors visit_lists(const Problem&, const HostTensors&);

/// Tiles of S that are computed, over all heads.
double visited_tiles(const Problem&);

/// The steps of operation forward that skip blocks of keys.
std::vector<Step> sparse_steps();

}  // namespace attn
