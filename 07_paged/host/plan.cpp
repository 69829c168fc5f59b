// Tiles are counted with tiles_of, the function that the kernels use.
#define ATTN_EMULATED
#include "host/plan.h"

#include <algorithm>
#include <numeric>

#include "device/device.h"
#include "kernels/decode/keys.h"
#include "kernels/line.h"
#include "kernels/splits.h"

namespace attn::plans {
namespace {

using namespace splits;

// Row blocks per sequence, all with the same keys.
int row_blocks_of_a_sequence(const Problem& p) {
  return static_cast<int>(row_blocks(p, kMmaRows) / p.batch);
}
std::vector<int> tiles_of_all(const Problem& p, const std::vector<int64_t>& lengths) {
  const Shape shape = shape_of(p);
  std::vector<int> tiles;
  for (const int64_t n : lengths)
    tiles.push_back(
        ::emulated::flash_decoding::tiles_of(shape, static_cast<int>(n), tile_keys(p.head_dim)));
  return tiles;
}

HostTensor work_tensor(const Plan& plan, int64_t most) {
  HostTensor t = zeros({"work", {1, 1, most, kWorkNumbers}, DType::int32, {}, nullptr, false, 2});
  int64_t* at = t.numbers.data();
  for (const WorkTile& w : plan.work) {
    at[0] = w.row_block, at[1] = w.tile, at[2] = w.count;
    at[3] = w.part, at[4] = w.num_parts, at[5] = w.first_part;
    at += kWorkNumbers;
  }
  return t;
}

}  // namespace

int64_t planned_blocks(const Problem& p) {
  if (const auto given = p.own.find("blocks"); given != p.own.end())
    return static_cast<int64_t>(given->second.at(0));
  return gpu_info().available ? gpu_info().num_sms : kSms;
}
int64_t most_chunks(const Problem& p) {
  return std::max(planned_blocks(p), row_blocks(p, kMmaRows));
}
int64_t most_pieces(const Problem& p) { return planned_blocks(p) + row_blocks(p, kMmaRows); }

//! [uniform]
Plan uniform_plan(const Problem& p, const std::vector<int64_t>& lengths, int64_t blocks,
                  int price) {
  const std::vector<int> tiles = tiles_of_all(p, lengths);
  const int heads = row_blocks_of_a_sequence(p);
  const auto chunks_of = [](int of, int chunk) { return (of + chunk - 1) / chunk; };
  const auto chunks = [&](int chunk) {
    int64_t all = 0;
    for (const int n : tiles) all += int64_t{chunks_of(n, chunk)} * heads;
    return all;
  };
  int chunk = 1, enough = *std::ranges::max_element(tiles);
  while (chunk < enough) {
    const int middle = (chunk + enough) / 2;
    if (chunks(middle) <= blocks)
      enough = middle;
    else
      chunk = middle + 1;
  }
  Plan plan;
  plan.budget = chunk + price;
  for (std::size_t b = 0; b < tiles.size(); ++b)
    for (int head = 0; head < heads; ++head) {
      const int parts = chunks_of(tiles[b], chunk);
      for (int part = 0; part < parts; ++part)
        plan.work.push_back({static_cast<int>(b) * heads + head, part * chunk,
                             std::min(chunk, tiles[b] - part * chunk), part, parts, plan.parts});
      if (parts > 1) plan.parts += parts;
    }
  for (std::size_t n = 0; n <= plan.work.size(); ++n) plan.begin.push_back(static_cast<int>(n));
  return plan;
}
//! [uniform]

namespace {

// Goes through all row blocks and fills one block after the other with work tiles up to `budget`;
// each costs its tiles plus `price`. Calls piece(block, row_block, tile, count) for each work tile
// and returns the number of blocks. Counting and planning share this routine.
//! [walk]
template <class PlannedTile>
int64_t walk(const std::vector<int>& tiles, int heads, int budget, int price, PlannedTile piece) {
  int64_t block = 0;
  int left = budget;
  for (std::size_t b = 0; b < tiles.size(); ++b)
    for (int head = 0; head < heads; ++head)
      for (int tile = 0; tile < tiles[b];) {
        if (left <= price) ++block, left = budget;
        const int count = std::min(tiles[b] - tile, left - price);
        piece(block, static_cast<int>(b) * heads + head, tile, count);
        tile += count, left -= count + price;
      }
  return block + 1;
}
//! [walk]

// Work tiles for at most `blocks` blocks, with the smallest sufficient budget.
//! [balanced]
Plan runs_of_budget(const std::vector<int>& tiles, int heads, int64_t blocks, int price) {
  int64_t cost = 0;
  for (const int n : tiles) cost += int64_t{n + price} * heads;
  Plan plan;
  plan.budget = std::max(static_cast<int>((cost + blocks - 1) / blocks), price + 1);
  while (walk(tiles, heads, plan.budget, price, [](auto...) {}) > blocks) ++plan.budget;
  plan.work.reserve(tiles.size() * static_cast<std::size_t>(heads) +
                    static_cast<std::size_t>(blocks));
  walk(tiles, heads, plan.budget, price, [&](int64_t block, int row_block, int tile, int count) {
    while (static_cast<int64_t>(plan.begin.size()) <= block)
      plan.begin.push_back(static_cast<int>(plan.work.size()));
    const int part = tile == 0 ? 0 : plan.work.back().part + 1;
    plan.work.push_back({row_block, tile, count, part, 1, plan.parts});
    if (tile + count < tiles[static_cast<std::size_t>(row_block / heads)] || part == 0) return;
    // The last work tile of a split row block: now the number of its parts is known.
    for (auto piece = plan.work.end() - part - 1; piece != plan.work.end(); ++piece)
      piece->num_parts = part + 1;
    plan.parts += part + 1;
  });
  plan.begin.resize(static_cast<std::size_t>(blocks) + 1, static_cast<int>(plan.work.size()));
  return plan;
}
//! [balanced]

// Expands a plan for groups of `together` row blocks: row block k of a group uses blocks
// k blocks + n, and its partial results start `stride` after those of row block k - 1.
//! [in_step]
Plan in_step(const Plan& plan, int together, int stride) {
  Plan all;
  all.parts = plan.parts * together, all.budget = plan.budget;
  for (int k = 0; k < together; ++k) {
    for (std::size_t n = 0; n + 1 < plan.begin.size(); ++n)
      all.begin.push_back(plan.begin[n] + k * static_cast<int>(plan.work.size()));
    for (WorkTile work : plan.work) {
      work.row_block = work.row_block * together + k;
      work.first_part += k * stride;
      all.work.push_back(work);
    }
  }
  all.begin.push_back(static_cast<int>(all.work.size()));
  return all;
}
//! [in_step]

}  // namespace

int in_step(const Problem& p, int64_t blocks) {
  return static_cast<int>(std::gcd(int64_t{row_blocks_of_a_sequence(p)}, blocks));
}

// Each row block and each cut adds a work tile; there is at most one cut per block, and a block
// leaves at most kPieceTiles of its budget unused. So the smallest budget is within 2 kPieceTiles
// of the mean.
Plan balanced_plan(const Problem& p, const std::vector<int64_t>& lengths, int64_t blocks,
                   int price) {
  const int together = in_step(p, blocks);
  const Plan plan = runs_of_budget(tiles_of_all(p, lengths), row_blocks_of_a_sequence(p) / together,
                                   blocks / together, price);
  return in_step(plan, together, plan.parts);
}
Plan runs_plan(const Problem& p, const std::vector<int64_t>& lengths, int64_t blocks) {
  return runs_of_budget(tiles_of_all(p, lengths), row_blocks_of_a_sequence(p), blocks, 0);
}
Plan team_plan(const Problem& p, const std::vector<int64_t>& lengths, int64_t teams) {
  return runs_of_budget(tiles_of_all(p, lengths), 1, teams, kPieceTiles);
}

Plan line_plan(const Problem& p, const std::vector<int64_t>& lengths, int64_t blocks) {
  const std::vector<int> tiles = tiles_of_all(p, lengths);
  const int together = in_step(p, blocks), heads = row_blocks_of_a_sequence(p) / together;
  blocks /= together;
  int total = 0;
  for (const int n : tiles) total += heads * (n + kPieceTiles);
  const int length = static_cast<int>((total + blocks - 1) / blocks);
  Plan plan;
  plan.budget = length + kPieceTiles;
  int start = 0, row_block = 0;
  for (const int n : tiles)
    for (int head = 0; head < heads; ++head, ++row_block, start += n + kPieceTiles)
      for (int part = 0, parts = 1; part < parts; ++part) {
        const WorkTile work = ::emulated::paged::piece_on_line(row_block, start, n, length, part);
        while (static_cast<int>(plan.begin.size()) <= work.first_part + part)
          plan.begin.push_back(static_cast<int>(plan.work.size()));
        plan.work.push_back(work);
        parts = work.num_parts;
        if (parts > 1) ++plan.parts;
      }
  plan.begin.resize(static_cast<std::size_t>(blocks) + 1, static_cast<int>(plan.work.size()));
  return in_step(plan, together, static_cast<int>(blocks));
}

HostTensors uniform_tensors(const Problem& p, const HostTensors& in) {
  const Plan plan = uniform_plan(p, in.at("seqused_k").numbers, planned_blocks(p));
  HostTensors tensors;
  tensors.emplace("work", work_tensor(plan, most_chunks(p)));
  return tensors;
}
namespace {
HostTensors tensors_of(const Plan& plan, int64_t most) {
  const auto begins = static_cast<int64_t>(plan.begin.size());
  HostTensor begin = zeros({"work_begin", {1, 1, 1, begins}, DType::int32, {}, nullptr, false, 1});
  std::ranges::copy(plan.begin, begin.numbers.begin());
  HostTensors tensors;
  tensors.emplace("work", work_tensor(plan, most));
  tensors.emplace("work_begin", std::move(begin));
  return tensors;
}
}  // namespace
HostTensors balanced_tensors(const Problem& p, const HostTensors& in) {
  return tensors_of(balanced_plan(p, in.at("seqused_k").numbers, planned_blocks(p)),
                    most_pieces(p));
}
int64_t teams(const Problem& p, int64_t rows) {
  const int64_t row_tiles = (p.heads * p.seqlen_q + rows - 1) / rows;
  return std::max<int64_t>(1, planned_blocks(p) / row_tiles);
}
HostTensors team_tensors(const Problem& p, const HostTensors& in, int64_t rows) {
  const int64_t count = teams(p, rows);
  return tensors_of(team_plan(p, in.at("seqused_k").numbers, count), count + p.batch);
}

int few_parts(const Problem& p, int64_t rows) {
  return static_cast<int>(256 / std::min(rows, p.heads * p.seqlen_q));
}
int64_t most_split_sequences(const Problem& p, int64_t rows) {
  return (teams(p, rows) - 1) / few_parts(p, rows);
}
bool combines(const Problem& p, int64_t rows) {
  std::vector<int64_t> lengths = p.seqused_k;
  lengths.resize(static_cast<std::size_t>(p.batch), p.seqlen_k);
  const int64_t longest = *std::ranges::max_element(lengths),
                all = std::max<int64_t>(
                    1, std::accumulate(lengths.begin(), lengths.end(), int64_t{0}));
  return std::min(longest * teams(p, rows) / all, longest / (2 * tile_keys(p.head_dim))) >
         few_parts(p, rows);
}
Plan pair_plan(const Problem& p, const std::vector<int64_t>& lengths, int64_t teams) {
  const std::vector<int> tiles = tiles_of_all(p, lengths);
  const int64_t pairs = std::accumulate(tiles.begin(), tiles.end(), int64_t{0}) / 2;
  Plan plan = team_plan(p, lengths, std::clamp<int64_t>(pairs, 1, teams));
  plan.begin.resize(static_cast<std::size_t>(teams) + 1, static_cast<int>(plan.work.size()));
  return plan;
}
HostTensors pair_tensors(const Problem& p, const HostTensors& in, int64_t rows) {
  const int64_t count = teams(p, rows), most = most_split_sequences(p, rows);
  const Plan plan = pair_plan(p, in.at("seqused_k").numbers, count);
  HostTensors tensors = tensors_of(plan, count + p.batch);
  if (most == 0) return tensors;
  HostTensor splits =
      zeros({"splits", {1, 1, most, kSplitNumbers}, DType::int32, {}, nullptr, false, 2});
  int64_t* at = splits.numbers.data();
  for (const WorkTile& w : plan.work)
    if (w.part == 0 && w.num_parts > few_parts(p, rows))
      *at++ = w.row_block, *at++ = w.num_parts, *at++ = w.first_part;
  tensors.emplace("splits", std::move(splits));
  return tensors;
}

}  // namespace attn::plans
