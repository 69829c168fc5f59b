// Which sequences share how many pages, and who works on a shared prefix: from the page table, on
// the host.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "attn/step.h"
#include "kernels/splits.h"

namespace attn::plans {

// Tiles of the kernel that reads prefixes: rows, keys of a block; and its resident blocks an SM,
// which the plan has pieces for. Of v8_shared_prefix, and of v17_prefix_tma.
struct PrefixTiles {
  int64_t rows, keys, blocks_per_sm;
};
constexpr PrefixTiles mma_prefix_tiles(int64_t head_dim) {
  return {splits::prefix_rows(head_dim), splits::kPrefillKeys, 2};
}
constexpr PrefixTiles wgmma_prefix_tiles(int64_t head_dim) {
  return {head_dim == 64 ? 192 : 128, splits::tile_keys(head_dim), 1};
}

// Some blocks of the keys of a prefix, with a tile of the queries of all sequences that share it:
// they are the rows of one matrix, member after member, each with the rows of its K/V head.
//! [prefix_work]
struct PrefixWork {
  int sequence, kv_head;   // whose row of the page table has the pages
  int first_member, rows;  // members[first_member] and on, and the rows of all of them
  int row0;                // of the tile
  int keys;                // of the prefix
  int begin, end;          // blocks of keys; where both are the same nothing is to be done
  int place;               // in the workspace, of the first row of all
};
//! [prefix_work]
constexpr int kPrefixNumbers = 9;

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
// Room for either tiles: entries of the list, and rows of parts.
int64_t most_prefix_places(const Problem&);
int64_t most_prefix_work(const Problem&);
// What it gives a step: prefix_work, members, prefix_of; suffix_table and suffix_used, which are
// page table and lengths without the prefixes; and a balanced plan of those.
HostTensors prefix_tensors(const Problem&, const HostTensors& inputs, PrefixTiles);

}  // namespace attn::plans
