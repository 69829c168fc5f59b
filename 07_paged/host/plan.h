// Plans: which block works on which keys, worked out on the host before a launch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attn/step.h"
#include "kernels/work.h"

namespace attn::plans {

struct Plan {
  std::vector<WorkTile> work;
  std::vector<int> begin;  // [blocks + 1]: block n has work[begin[n]] to work[begin[n + 1] - 1]
  int parts = 0;           // of row blocks that are shared
  int budget = 0;          // tiles of a block at most, each piece counted as kPieceTiles more
};

// One piece a block. All sequences are cut into chunks of one length: the smallest of which there
// are no more than `blocks`. Where there are more row blocks than that, none is cut.
Plan uniform_plan(const Problem&, const std::vector<int64_t>& lengths, int64_t blocks, int price);
// Pieces of any length, several a block: runs through the row blocks that cost alike. Row blocks in
// step are cut at the same tiles.
Plan balanced_plan(const Problem&, const std::vector<int64_t>& lengths, int64_t blocks, int price);
// The same at the price of kPieceTiles.
inline Plan uniform_plan(const Problem& p, const std::vector<int64_t>& lengths, int64_t blocks) {
  return uniform_plan(p, lengths, blocks, kPieceTiles);
}
inline Plan balanced_plan(const Problem& p, const std::vector<int64_t>& lengths, int64_t blocks) {
  return balanced_plan(p, lengths, blocks, kPieceTiles);
}
// What the blocks of v2 and v3 find for themselves: as many tiles each, whatever the pieces cost.
Plan runs_plan(const Problem&, const std::vector<int64_t>& lengths, int64_t blocks);

// Pieces of any length by the rule of line.h, as v6 makes them on the device: first_part is the
// block of the first part.
Plan line_plan(const Problem&, const std::vector<int64_t>& lengths, int64_t blocks);

// Pieces that a balanced plan has at most.
int64_t most_pieces(const Problem&);
// What the two give a step (Step::plan): work [most, 6] and, of a balanced plan, work_begin [blocks
// + 1].
HostTensors uniform_tensors(const Problem&, const HostTensors& inputs);
HostTensors balanced_tensors(const Problem&, const HostTensors& inputs);

Plan team_plan(const Problem&, const std::vector<int64_t>& lengths, int64_t teams);
HostTensors team_tensors(const Problem&, const HostTensors& inputs, int64_t rows);

// The cost of each SM's pieces, in tiles, if a block runs where an SM is free first.
std::vector<std::vector<int>> busy_tiles(const Plan&, int64_t sms);
// What plans make of batches of many kinds on 132 SMs, as a table in Markdown and as a picture in
// SVG: by the tiles that they count, without a GPU.
std::string plan_table();
std::string plan_picture();
// `07_paged --plans [--svg FILE]`.
int plans_command(const std::vector<std::string>& arguments);

}  // namespace attn::plans
