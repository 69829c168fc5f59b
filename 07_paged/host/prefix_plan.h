// Which sequences share how many pages, and who works on a shared prefix: from the page table, on
// the host.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "attn/step.h"
#include "kernels/work.h"

namespace attn::plans {

struct PrefixPlan {
  std::vector<PrefixWork> work;
  std::vector<int> members;  // sequences, those that share a prefix side by side
  // Of each sequence: parts of its prefix (0: it shares none), the place of the first one, which
  // of the rows of all members is its first, and how many there are.
  struct Share {
    int parts, place, first_row, rows;
  };
  std::vector<Share> of_sequence;
  std::vector<int64_t> keys;  // of each sequence, that it shares
  int64_t places = 0;
};

// One level: sequences whose pages are the same up to some key, if that is worth it. What a window
// hides from somebody is not shared, nor what a query does not see.
PrefixPlan prefix_plan(const Problem&, const std::vector<int64_t>& table,
                       const std::vector<int64_t>& lengths, int64_t blocks, PrefixTiles);
// Room for either tiles: rows of parts.
int64_t most_prefix_places(const Problem&);
// What it gives a step: prefix_work, members, prefix_of; suffix_table and suffix_used, which are
// page table and lengths without the prefixes; and a balanced plan of those.
HostTensors prefix_tensors(const Problem&, const HostTensors& inputs, PrefixTiles);

}  // namespace attn::plans
