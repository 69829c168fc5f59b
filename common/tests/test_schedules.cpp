/// \file
/// Every step under many schedules: right, and without a race, in shared memory and between its
/// blocks. Linked into every chapter's tests.
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

struct FindRaces {
  FindRaces() { emulator::find_races = true; }
  ~FindRaces() { emulator::find_races = emulator::find_global_races = false; }
};

// ATTN_SCHEDULES=100: so many instead of five.
std::uint64_t schedules() {
  const char* const text = std::getenv("ATTN_SCHEDULES");
  return text ? std::strtoull(text, nullptr, 10) : 5;
}

// Two heads and two sequences of tiles that are not whole; every fifth problem has more tiles than
// persistent kernels have blocks. Mask, head dim and type take turns, each with each of the others.
Problem plain_problem(std::uint64_t schedule) {
  const bool large = schedule % 5 == 0;
  Problem p = problem(large ? 150 : 20, large ? 200 : 90, schedule / 2 % 2 == 1 ? 128 : 64,
                      schedule / 3 % 2 == 1 ? DType::fp16 : DType::bf16);
  p.batch = large ? 2 : 1, p.heads = 2, p.kv_heads = 1;
  p.causal = schedule % 2 == 1;
  p.top_k = 5;
  p.seed = schedule;  // and the schedule follows from it
  return p;
}
// The same with a feature more, for the steps that have it.
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
  for (std::uint64_t schedule = 1; schedule <= schedules(); ++schedule) {
    // Every third looks at each block for itself, as exercises do.
    emulator::find_global_races = schedule % 3 != 0;
    Problem few = plain_problem(schedule);  // of queries, for steps that decode
    few.seqlen_q = few.seqlen_q > 100 ? 16 : 3;
    Problem eight = plain_problem(schedule);  // bits
    eight.dtype = DType::e4m3;
    Problem problems[] = {featured_problem(schedule), plain_problem(schedule), few, eight};
    for (Problem& p : problems) p.finish();
    std::map<std::pair<const Operation*, const Problem*>, Case> cases;  // one for all their steps
    for (const Step& step : chapter().steps) {
      const Problem* const p = std::find_if(std::begin(problems), std::end(problems),
                                            [&](const Problem& q) { return !refusal(step, q); });
      if (p == std::end(problems)) continue;
      const auto found = cases.try_emplace({step.operation, p}, *p, *step.operation).first;
      INFO(step.name << ", schedule " << schedule << ": " << p->text());
      CHECK(run_step(step, found->second, Backend::emulated) == "");
      ran.insert(step.name);
    }
  }
  for (const Step& step : chapter().steps) {
    INFO(step.name << " has run no problem");
    CHECK((ran.count(step.name) == 1 || schedules() < 5));
  }
}
