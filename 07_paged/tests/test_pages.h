// Shared by the tests of chapter 07: problems in pages, the decode steps.
#pragma once

#include <algorithm>

#include "07_paged/host/paged.h"
#include "07_paged/kernels/splits.h"
#include "tests/step_cases.h"

namespace attn::tests {

inline Problem paged(int64_t queries, int64_t room, int64_t head_dim, int64_t page, DType dtype,
                     InputKind inputs = InputKind::random) {
  Problem p = problem(queries, room, head_dim, dtype, inputs);
  p.own["page_size"] = {static_cast<double>(page)};
  return p;
}

inline std::vector<const Step*> decode_steps() {
  std::vector<const Step*> steps;
  for (const Step& step : chapter().steps)
    if (step.operation->name == "paged_decode") steps.push_back(&step);
  return steps;
}

/// Replays the captured launch of a session with the inputs of `p`, and checks that its results are
/// bitwise those of a launch of its own. `schedule`: that of the replay in the emulator.
inline void check_replay(Session& session, const Step& step, const Problem& p, Backend backend,
                         uint64_t schedule = 100) {
  HostTensors expected;
  CHECK(run_step(step, p, backend, &expected) == "");
  const HostTensors inputs = draw(*step.operation, p).tensors;
  session.replace(inputs);
  session.replan(inputs);
  emulator::schedule_seed = schedule;
  CHECK(session.launch().message == "");
  for (const auto& [name, t] : session.outputs()) CHECK(same(t, expected.at(name)));
  CHECK(!session.damage());
}

/// Checks that three sequences, of which the first two have equal lengths and none fills its last
/// page, get wrong results from wrong inputs: another sequence's row of the page table, a length
/// that is off by one, and with `stale_plan` the plan of another length.
inline void check_wrong_pages(const Step& step, const Problem& p, bool stale_plan = false) {
  INFO(step.name << ": " << p.text());
  const Case right(p, *step.operation);
  Session session(p, *step.operation, Backend::emulated, right.inputs);
  REQUIRE(session.prepare(step).ok());
  const auto passes = [&](const HostTensors& inputs, bool replan = true) {
    session.replace(inputs);
    if (replan) session.replan(inputs);
    REQUIRE(session.launch().ok());
    return check(session.outputs().at("o"), right.expected[0]).pass;
  };
  CHECK(passes(right.inputs));
  HostTensors wrong = right.inputs;
  std::vector<int64_t>& table = wrong.at("page_table").numbers;
  std::copy_n(table.begin(), splits::max_pages_of(p), table.begin() + splits::max_pages_of(p));
  CHECK(!passes(wrong));
  for (const int64_t off : {-1, 1}) {
    wrong = right.inputs;
    wrong.at("seqused_k").numbers[1] += off;
    CHECK(!passes(wrong));
  }
  if (!stale_plan) return;
  wrong = right.inputs;
  wrong.at("seqused_k").numbers[1] = 20;
  session.replan(wrong);  // one KV tile
  CHECK(!passes(right.inputs, false));
  CHECK(passes(right.inputs));
}

}  // namespace attn::tests
