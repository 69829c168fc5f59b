/// \file
/// Every step under many schedules: right, and without a race, in shared memory and between its
/// blocks. Linked into every chapter's tests.
#include <cstdlib>
#include <map>
#include <string>

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

}  // namespace

TEST_CASE("no step has a race in any of many schedules of the emulator", "[emulated][schedules]") {
  const FindRaces find;
  // Two heads and two sequences of tiles that are not whole, with a mask and, every other time,
  // without; every fifth problem has more tiles than persistent kernels have blocks, every third
  // looks at each block for itself, as exercises do; types and head dims take turns.
  for (std::uint64_t schedule = 1; schedule <= schedules(); ++schedule) {
    const bool large = schedule % 5 == 0;
    emulator::find_global_races = schedule % 3 != 0;
    Problem p = problem(large ? 150 : 20, large ? 200 : 90, schedule % 4 == 2 ? 128 : 64,
                        schedule % 4 == 0 ? DType::fp16 : DType::bf16);
    p.batch = large ? 2 : 1, p.heads = 2, p.kv_heads = 1;
    p.causal = schedule % 2 == 1;
    p.top_k = 5;
    p.seed = schedule;  // and the schedule follows from it
    p.finish();
    std::map<const Operation*, Case> cases;  // one for all steps of an operation
    for (const Step& step : chapter().steps) {
      Problem few = p;
      if (step.operation->few_queries > 0) few.seqlen_q = large ? 16 : 3;
      if (refusal(step, few)) continue;
      const auto found = cases.try_emplace(step.operation, few, *step.operation).first;
      INFO(step.name << ", schedule " << schedule << ": " << few.text());
      CHECK(run_step(step, found->second, Backend::emulated) == "");
    }
  }
}
