/// \file
/// Every step under many schedules: correct results and no races, in shared memory and between
/// blocks. Linked into every chapter's tests.
#include <charconv>
#include <cstdlib>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "attn/mask.h"
#include "attn/sliding_tiles.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

struct FindRaces {
  FindRaces() { emulator::find_races = true; }
  ~FindRaces() { emulator::find_races = emulator::find_global_races = false; }
};

// ATTN_SCHEDULES=100 runs schedules 1 to 100, ATTN_SCHEDULES=21-40 those (many_schedules.sh in
// common/scripts). The first three are of all three kinds (run/schedule.h).
struct Schedules {
  std::uint64_t first = 1, last = 3;
};
Schedules schedules() {
  const char* const text = std::getenv("ATTN_SCHEDULES");
  if (!text) return {};
  const std::string_view all(text);
  const auto dash = all.find('-');
  const auto number = [](std::string_view part) {
    std::uint64_t n = 0;
    const auto end = std::from_chars(part.data(), part.data() + part.size(), n);
    return end.ec == std::errc() && end.ptr == part.data() + part.size() ? n : 0;
  };
  const Schedules some{dash == all.npos ? 1 : number(all.substr(0, dash)),
                       number(dash == all.npos ? all : all.substr(dash + 1))};
  constexpr std::uint64_t kMost = 999'999'999;
  if (some.first > 0 && some.first <= some.last && some.last <= kMost) return some;
  std::cerr << "ATTN_SCHEDULES=" << text << ": how many schedules, at least 1, or FIRST-LAST\n";
  std::exit(2);
}

// Every fifth problem, from the third on, has more tiles than persistent kernels have CTAs.
bool is_large(std::uint64_t schedule) { return schedule % 5 == 3; }

// Two heads and two sequences with partial tiles. Mask, head dim and type vary so that every
// combination occurs.
Problem plain_problem(std::uint64_t schedule) {
  const bool large = is_large(schedule);
  Problem p = problem(large ? 150 : 20, large ? 200 : 90, schedule / 2 % 2 == 1 ? 128 : 64,
                      schedule / 3 % 2 == 1 ? DType::fp16 : DType::bf16);
  p.batch = large ? 2 : 1, p.heads = 2, p.kv_heads = 1;
  p.causal = schedule % 2 == 1;
  p.top_k = 5;
  p.seed = schedule;  // determines the schedule
  return p;
}
// The same with an additional feature, for the steps that support it.
Problem featured_problem(std::uint64_t schedule) {
  Problem p = plain_problem(schedule);
  switch ((schedule + schedule / 5) % 5) {
    case 0: p.causal = false, p.window_left = 40, p.window_right = 5; break;
    case 1: p.softcap = 3; break;
    case 2: p.alibi = true; break;
    case 3: p.varlen_q = {p.seqlen_q, 7, 0}, p.varlen_k = {p.seqlen_k, 33, 5}; break;
    default: p.dropout = 0.25;
  }
  return p;
}

}  // namespace

TEST_CASE("no step has a race in any of many schedules of the emulator", "[emulated][schedules]") {
  const FindRaces find;
  std::set<std::string> ran;
  const auto [first, last] = schedules();
  for (std::uint64_t schedule = first; schedule <= last; ++schedule) {
    // In every fourth, blocks are checked separately, as in exercises.
    emulator::find_global_races = schedule % 4 != 2;
    Problem few = plain_problem(schedule);  // few queries, for decode steps
    few.seqlen_q = few.seqlen_q > 100 ? 16 : 3;
    std::vector<Problem> problems{featured_problem(schedule), plain_problem(schedule), few};
    for (const DType type : {DType::int8, DType::e4m3, DType::int4})  // and in few bits
      for (const std::size_t n : {std::size_t{1}, std::size_t{2}}) {
        problems.push_back(problems[n]);
        problems.back().dtype = type;
        // before the quantised one, for steps that rotate Q and K
        if (type == DType::e4m3 && n == 1) {
          problems.push_back(problems.back());
          problems[problems.size() - 2].own["rotary"] = {1};
        }
      }
    problems.push_back(few);  // attention of one K/V head with 576 columns
    problems.back().head_dim = 576;
    for (const std::size_t n : {0, 1}) {  // steps for wide heads alone, with features and without
      problems.push_back(problems[n]);
      problems.back().head_dim = 256;
    }
    problems.push_back(problems[1]);  // column intervals
    std::vector<int64_t> begin, end;
    for (int64_t j = 0; j < problems[1].seqlen_k; ++j)
      begin.push_back(j / 2), end.push_back(j / 2 + j % 7);
    problems.back().mask = std::make_shared<ColumnIntervals>(
        std::vector<int64_t>{1, 1, 1, problems[1].seqlen_k}, begin, end);
    problems.push_back(problems[1]);  // windows of tiles
    problems.back().causal = false;
    problems.back().seqlen_q = problems.back().seqlen_k = 4 * 128 + 20;
    problems.back().mask = std::make_shared<SlidingTiles>(Sides{2, 16, 16}, Sides{2, 8, 8},
                                                          std::vector<Sides>(2, {2, 8, 16}), 20);
    problems.push_back(problems[1]);  // block lists with skipped P V
    problems.back().own["skip_below"] = {4};
    problems.push_back(problems[1]);  // tokens of a canvas, and text
    problems.back().causal = false;
    problems.back().seqlen_q = problems.back().seqlen_k = 4 * 8 * 8 + 20;
    problems.back().own["field"] = {4, 8, 8};
    problems.push_back(few);  // one query that reads a part of each key
    problems.back().seqlen_q = 1, problems.back().dtype = DType::bf16;
    problems.back().causal = false;
    problems.back().own["top_columns"] = {16}, problems.back().own["top_keys"] = {20};
    problems.back().own["newest_keys"] = {4};
    problems.push_back(problems[1]);  // several ranks
    problems.back().kv_heads = 2, problems.back().own["devices"] = {0, 1};
    problems.back().seqlen_q = problems.back().seqlen_k;
    problems.push_back(few);
    problems.back().own["devices"] = {0, 1, 2};
    problems.push_back(few);  // pages on several ranks
    problems.back().own["devices"] = {0, 1, 2};
    problems.back().causal = false, problems.back().window_left = problems.back().window_right = -1;
    for (Problem& p : problems) p.finish();
    // shared by all steps of a problem
    std::map<std::pair<const Operation*, const Problem*>, Case> cases;
    for (const Step& step : chapter().steps) {
      const auto at =
          std::ranges::find_if(problems, [&](const Problem& q) { return !refusal(step, q); });
      if (at == problems.end()) continue;
      // The large problem takes as long as all others: if no step has a producer warp, steps take
      // turns at it.
      if (is_large(schedule) && chapter().name < "05" &&
          !in_turn(step, static_cast<int>(schedule / 5)))
        continue;
      const Problem* const p = &*at;
      const auto found = cases.try_emplace({step.operation, p}, *p, *step.operation).first;
      INFO(step.name << ", schedule " << schedule << ": " << p->text());
      CHECK(run_step(step, found->second, Backend::emulated) == "");
      ran.insert(step.name);
    }
  }
  for (const Step& step : chapter().steps) {
    INFO(step.name << " has run no problem");
    CHECK((ran.count(step.name) == 1 || last - first < 2));
  }
}
