// Plans of chapter 07: every tile of every sequence in one work tile; table, figure and exercise c
// agree with the plans.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <random>

#include "07_paged/host/plan.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

struct Batch {
  Problem problem;
  std::vector<int64_t> lengths;
  int64_t blocks;
};
Batch random_batch(std::mt19937_64& random) {
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  const int64_t most[] = {3, 200, 2000, 100000}, heads = 1 + below(8);
  Problem p = problem(1 + below(3), 1, below(4) == 0 ? 256 : 128, DType::bf16);
  p.batch = 1 + below(below(4) == 0 ? 300 : 20);
  p.kv_heads = heads, p.heads = heads * (1 + below(17));
  p.causal = below(2) == 0;
  if (below(4) == 0) p.window_left = below(500), p.window_right = 0;
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < p.batch; ++b)
    lengths.push_back(below(5) == 0 ? 0 : below(most[below(below(8) == 0 ? 4 : 3)]));
  p.seqlen_k = std::max<int64_t>(1, *std::ranges::max_element(lengths));
  p.finish();
  return {p, lengths, 1 + below(below(2) == 0 ? 8 : 264)};
}

// Properties that differ between kinds of plans.
struct Kind {
  bool chunks = false;   // one work tile per block; more blocks if there are more row blocks
  bool in_step = false;  // neighbouring row blocks are cut at the same tiles
  bool on_line = false;  // partial results are indexed by block
  bool teams = false;    // a row block is a sequence
  int price = plans::kPieceTiles;
};
constexpr Kind kUniform{.chunks = true}, kBalanced{.in_step = true}, kRuns{.price = 0},
    kTeams{.teams = true}, kLine{.in_step = true, .on_line = true};

// "" if every visible key is in exactly one work tile, no block exceeds the budget, and no partial
// result lies outside the workspace; otherwise the error. Tiles are counted independently, from
// Problem.
std::string wrong_with(const Batch& batch, const plans::Plan& plan, const Kind& kind) {
  const Problem& p = batch.problem;
  const int64_t tile = p.head_dim <= 128 ? 128 : 64;
  const int64_t row_blocks =  // per sequence
      kind.teams ? 1 : p.kv_heads * ((p.group() * p.seqlen_q + 15) / 16);
  const bool on_line = kind.on_line;
  std::vector<int> places(static_cast<std::size_t>(on_line ? 2 * batch.blocks : plan.parts));
  const auto partial_index = [&](const plans::WorkTile& w) {
    const int place = on_line ? 2 * (w.first_part + w.part) + (w.part == 0) : w.first_part + w.part;
    return static_cast<std::size_t>(place);
  };
  std::vector<plans::WorkTile> work = plan.work;
  std::ranges::stable_sort(work, {}, &plans::WorkTile::row_block);
  std::size_t at = 0;
  for (int64_t row_block = 0; row_block < p.batch * row_blocks; ++row_block) {
    Problem one = p;
    one.seqused_k = batch.lengths;
    one = one.sequence(row_block / row_blocks);
    const int64_t keys = one.visible(one.seqlen_q - 1).end - one.visible(0).begin;
    const int64_t tiles = std::max<int64_t>(1, (std::max<int64_t>(0, keys) + tile - 1) / tile);
    int64_t covered = 0, first = -1, parts = 0;
    for (; at < work.size() && work[at].row_block == row_block; ++at) {
      const plans::WorkTile& w = work[at];
      if (w.tile != covered || w.count < 1) return "a tile is in two pieces, or in none";
      if (w.part != parts++) return "the parts are not in the order of the keys";
      if (first >= 0 && w.first_part != first) return "the parts lie apart";
      covered += w.count, first = w.first_part;
      if (w.num_parts > 1) {
        if (partial_index(w) >= places.size()) return "a part behind the last one";
        if (places[partial_index(w)]++) return "a place of two parts";
      }
      if (w.num_parts == 1 && w.count != tiles) return "a part that is taken for the whole";
    }
    if (covered != tiles) return "a row block is not covered";
    if (parts != work[at - 1].num_parts) return "another number of parts";
  }
  if (at != work.size()) return "a work tile of no block";
  if (plan.begin.front() != 0 || plan.begin.back() != static_cast<int>(at)) return "begins";
  for (std::size_t n = 0; n + 1 < plan.begin.size(); ++n) {
    int cost = 0;
    for (int w = plan.begin[n]; w < plan.begin[n + 1]; ++w)
      cost += plan.work[static_cast<std::size_t>(w)].count + kind.price;
    if (cost > plan.budget) return "a block is over its budget";
  }
  const auto blocks = static_cast<int64_t>(plan.begin.size()) - 1;
  if (kind.in_step) {  // neighbouring row blocks have the same tiles
    const auto together = static_cast<std::size_t>(plans::in_step(p, batch.blocks));
    const std::size_t pieces = plan.work.size() / together;
    for (std::size_t n = pieces; n < plan.work.size(); ++n) {
      const plans::WorkTile &of = plan.work[n - pieces], &w = plan.work[n];
      if (w.row_block != of.row_block + 1 || w.tile != of.tile || w.count != of.count)
        return "row blocks out of step";
    }
    const auto slots = static_cast<std::size_t>(blocks) / together;
    for (std::size_t n = slots; n < plan.begin.size(); ++n)
      if (plan.begin[n] != plan.begin[n - slots] + static_cast<int>(pieces))
        return "blocks out of step";
  }
  if (kind.chunks ? blocks > std::max(batch.blocks, p.batch * row_blocks) : blocks != batch.blocks)
    return "too many blocks";
  if (kind.teams && std::ssize(plan.work) > batch.blocks + p.batch) return "too many pieces";
  return plan.parts <= 2 * batch.blocks ? "" : "more parts than the workspace has room for";
}

}  // namespace

TEST_CASE("plans cover every tile of every sequence once", "[emulated]") {
  std::mt19937_64 random(1);
  for (int n = 0; n < 10'000; ++n) {
    const Batch batch = random_batch(random);
    INFO(n << ": " << batch.problem.text() << " in " << batch.blocks << " blocks");
    const auto uniform = plans::uniform_plan(batch.problem, batch.lengths, batch.blocks);
    const auto balanced = plans::balanced_plan(batch.problem, batch.lengths, batch.blocks);
    REQUIRE(wrong_with(batch, uniform, kUniform) == "");
    REQUIRE(wrong_with(batch, balanced, kBalanced) == "");
    const auto runs = plans::runs_plan(batch.problem, batch.lengths, batch.blocks);
    REQUIRE(wrong_with(batch, runs, kRuns) == "");
    const auto teams = plans::team_plan(batch.problem, batch.lengths, batch.blocks);
    REQUIRE(wrong_with(batch, teams, kTeams) == "");
    const auto line = plans::line_plan(batch.problem, batch.lengths, batch.blocks);
    REQUIRE(wrong_with(batch, line, kLine) == "");
    REQUIRE(line.budget <= balanced.budget + plans::kPieceTiles);
    // At most the price of two work tiles above the mean.
    int64_t cost = 0;
    for (const plans::WorkTile& w : balanced.work) cost += w.part == 0 ? plans::kPieceTiles : 0;
    for (const plans::WorkTile& w : balanced.work) cost += w.count;
    REQUIRE(balanced.budget <=
            (cost + batch.blocks - 1) / batch.blocks + 2 * plans::kPieceTiles + 1);
  }
}

ATTN_DECLARE_LAUNCH(v6_device_plan, plan);

namespace {
// The plan of v6's kernel equals the host's, block by block.
void device_plans(Backend backend, int batches) {
  std::mt19937_64 random(2);
  for (int n = 0; n < batches; ++n) {
    Batch batch = random_batch(random);
    Problem& p = batch.problem;
    p.seqused_k = batch.lengths;
    p.own["blocks"] = {static_cast<double>(batch.blocks)};
    INFO(n << ": " << p.text() << " in " << batch.blocks << " blocks");
    const plans::Plan plan = plans::line_plan(p, batch.lengths, batch.blocks);
    const HostTensor lengths = draw_inputs(p, std::vector{seqused_of(p)}).at("seqused_k");
    DeviceBuffer seqused(backend, "seqused_k", lengths.spec.bytes());
    seqused.upload(to_bytes(lengths).data());
    std::vector<plans::WorkTile> work(static_cast<std::size_t>(plans::most_pieces(p)));
    std::vector<int> range(static_cast<std::size_t>(2 * batch.blocks));
    DeviceBuffer works(backend, "work",
                       static_cast<int64_t>(work.size() * sizeof(plans::WorkTile)));
    DeviceBuffer ranges(backend, "work_range", static_cast<int64_t>(range.size() * sizeof(int)));
    works.poison(), ranges.poison();
    Arguments arguments(p, backend);
    arguments.bind("seqused_k", seqused.data());
    arguments.bind("work", works.data());
    arguments.bind("work_range", ranges.data());
    choose_schedule(p.seed);
    const Launch launch = ATTN_LAUNCH_OF(v6_device_plan, plan);
    const Status status = launch.on(backend)(arguments);
    REQUIRE(status.message == "");
    synchronize(backend);
    works.download(work.data()), ranges.download(range.data());
    REQUIRE(!works.broken_guard());
    REQUIRE(!ranges.broken_guard());
    const auto numbers = [](const plans::WorkTile& w) {
      return std::vector{w.row_block, w.tile, w.count, w.part, w.num_parts, w.first_part};
    };
    std::vector<std::vector<int>> host, device;
    for (std::size_t block = 0; block + 1 < plan.begin.size(); ++block) {
      REQUIRE(range[2 * block + 1] - range[2 * block] == plan.begin[block + 1] - plan.begin[block]);
      for (int w = range[2 * block]; w < range[2 * block + 1]; ++w)
        device.push_back(numbers(work[static_cast<std::size_t>(w)]));
    }
    for (const plans::WorkTile& w : plan.work) host.push_back(numbers(w));
    REQUIRE(device == host);
  }
}
}  // namespace

TEST_CASE("the device plan equals the host plan", "[emulated]") {
  device_plans(Backend::emulated, 200);
}
TEST_CASE("the device plan equals the host plan on the GPU", "[gpu]") {
  device_plans(Backend::gpu, 2000);
}

namespace {
std::string text_of(const std::string& file) {
  std::ifstream in(std::string(ATTN_SOURCE_DIR) + "/" + file);
  return {std::istreambuf_iterator<char>(in), {}};
}
}  // namespace

TEST_CASE("RESULTS shows the table that --plans prints", "[emulated]") {
  CHECK(text_of("07_paged/RESULTS.md").find(plans::plan_table()) != std::string::npos);
  CHECK(text_of("docs/figures/07_plans.svg") == plans::plan_picture());
}

TEST_CASE("the answers of exercise c are those of the plans", "[emulated]") {
  //! [answers]
  Problem p = problem(1, 2500, 128, DType::bf16);
  p.batch = 4, p.heads = p.kv_heads = 1;
  p.finish();
  std::vector<int64_t> lengths{1000, 100, 0, 2500};
  const auto tiles_of = [&] {
    int tiles = 0;
    for (const plans::WorkTile& w : plans::balanced_plan(p, lengths, 6, 1).work) tiles += w.count;
    return tiles;
  };
  const plans::Plan uniform = plans::uniform_plan(p, lengths, 6, 1),
                    balanced = plans::balanced_plan(p, lengths, 6, 1);
  std::map<std::string, std::size_t> is{
      {"tiles", tiles_of()},       {"chunk", uniform.budget - 1}, {"chunks", uniform.work.size()},
      {"longest", uniform.budget}, {"budget", balanced.budget},   {"pieces", balanced.work.size()},
      {"parts", balanced.parts}};
  for (const int planned = tiles_of(); tiles_of() == planned; ++is["step"])
    for (int64_t& n : lengths) ++n;
  const std::string answers = text_of("07_paged/exercises/c.solution.txt");
  for (const auto& [name, value] : is) {
    INFO(name << " = " << value);
    CHECK(answers.find(name + " = " + std::to_string(value) + "\n") != std::string::npos);
  }
  //! [answers]
}
