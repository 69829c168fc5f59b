// Finds shared prefixes in the page table and assigns their work tiles to blocks, on the host.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "attn/step.h"
#include "kernels/work.h"

namespace attn::plans {

struct PrefixPlan {
  std::vector<PrefixWork> work;
  std::vector<int> members;  // sequences; the members of each group are contiguous
  // Per sequence: parts of its prefix (0: none shared), its first partial result, its first row
  // among the rows of all members, and its number of rows.
  struct Share {
    int parts, place, first_row, rows;
  };
  std::vector<Share> of_sequence;
  std::vector<int64_t> keys;  // shared keys, per sequence
  int64_t places = 0;
};

// One level: groups sequences whose page tables start with the same pages, if the prefix is long
// enough. Keys that a window or the causal mask hides from some query are not shared.
PrefixPlan prefix_plan(const Problem&, const std::vector<int64_t>& table,
                       const std::vector<int64_t>& lengths, int64_t blocks, PrefixTiles);
// Rows of partial results, enough for both tile sizes.
int64_t most_prefix_places(const Problem&);
// Tensors of a step: prefix_work, members, prefix_of; suffix_table and suffix_used, the page table
// and lengths without prefixes; and a balanced plan for the suffixes.
HostTensors prefix_tensors(const Problem&, const HostTensors& inputs, PrefixTiles);

}  // namespace attn::plans
