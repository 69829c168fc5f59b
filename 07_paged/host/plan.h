// Plans: lists that assign work tiles to blocks, made on the host before a launch.
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
  int parts = 0;           // partial results, of split row blocks
  int budget = 0;          // largest cost of a block: tiles, plus kPieceTiles per work tile
};

// One work tile per block. All sequences are cut into chunks of one length, the smallest that gives
// at most `blocks` chunks. If there are more row blocks than that, none is cut.
Plan uniform_plan(const Problem&, const std::vector<int64_t>& lengths, int64_t blocks, int price);
// Work tiles of any length, several per block: blocks of equal cost. Neighbouring row blocks are
// cut at the same tiles.
Plan balanced_plan(const Problem&, const std::vector<int64_t>& lengths, int64_t blocks, int price);
// The same with the price kPieceTiles.
inline Plan uniform_plan(const Problem& p, const std::vector<int64_t>& lengths, int64_t blocks) {
  return uniform_plan(p, lengths, blocks, kPieceTiles);
}
inline Plan balanced_plan(const Problem& p, const std::vector<int64_t>& lengths, int64_t blocks) {
  return balanced_plan(p, lengths, blocks, kPieceTiles);
}
// The runs that the blocks of v2 and v3 compute themselves: equally many tiles, without a price.
Plan runs_plan(const Problem&, const std::vector<int64_t>& lengths, int64_t blocks);

// Plan of line.h, as v6 makes it on the device; first_part is the block of the first part.
Plan line_plan(const Problem&, const std::vector<int64_t>& lengths, int64_t blocks);

// Upper bound on the work tiles of a balanced plan.
int64_t most_pieces(const Problem&);
// Tensors of both plans for a step (Step::plan): work [most, 6] and, for a balanced plan,
// work_begin [blocks + 1].
HostTensors uniform_tensors(const Problem&, const HostTensors& inputs);
HostTensors balanced_tensors(const Problem&, const HostTensors& inputs);

Plan team_plan(const Problem&, const std::vector<int64_t>& lengths, int64_t teams);
HostTensors team_tensors(const Problem&, const HostTensors& inputs, int64_t rows);
// The same with at least two tiles per team, and splits [most_split_sequences, 3]; zeros behind the
// last one.
Plan pair_plan(const Problem&, const std::vector<int64_t>& lengths, int64_t teams);
HostTensors pair_tensors(const Problem&, const HostTensors& inputs, int64_t rows);

// Cost of each SM's work tiles, in KV tiles, if each block runs on the first free SM.
std::vector<std::vector<int>> busy_tiles(const Plan&, int64_t sms);
// What plans make of batches of many kinds on 132 SMs, as a table in Markdown and as a picture in
// SVG: by the tiles that they count, without a GPU.
std::string plan_table();
std::string plan_picture();
// `07_paged --plans [--svg FILE]`.
int plans_command(const std::vector<std::string>& arguments);

}  // namespace attn::plans
