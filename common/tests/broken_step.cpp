// Runs one version of a step (broken_step.h) in the emulator, under twelve schedules, in half of which
// copies are early.
//
//     broken_v5_persistent 3   exits with 0 if the first schedule that fails says the declared reason
//     broken_v5_persistent 0   the step unchanged: exits with 0 if all schedules pass
//
// What is said begins with "mismatch" or "damage" (a guard band, an input), or it is the emulator's own
// line: "deadlock: ...", "... calls wgmma at ... without wgmma_fence since the last wait".
#include "tests/broken_step.h"

#include <fmt/format.h>

#include <cstdlib>

#include "attn/check.h"
#include "attn/inputs.h"
#include "attn/session.h"
#include "emulator/simt.h"

namespace {

using namespace attn;

// A step around a version's launch. Steps that take tiles of queries from a queue find it empty.
Step step_of(const tests::Version& version) {
  Step step;
  step.name = "version";
  step.operation = "forward";
  step.refuses = [](const Problem&) { return std::nullopt; };
  step.workspaces = [](const Problem&) { return std::vector<Workspace>{{"queue", 4, true}}; };
  step.prepare.emulated = [](const Arguments& args) {
    *args.out<unsigned>("queue") = 0;
    return Status{};
  };
  step.launch.emulated = version.launch;
  return step;
}

// What is wrong with the step under this schedule, or "".
std::string run(const Step& step, Session& session, const std::vector<Expected>& expected) {
  if (const Status status = session.prepare(step); !status.ok()) return status.message;
  if (const Status status = session.launch(); !status.ok()) return status.message;
  if (const auto damage = session.damage()) return "damage: " + *damage;
  const HostTensors outputs = session.outputs();
  for (const Expected& e : expected)
    if (const Verdict v = check(outputs.at(e.spec.name), e); !v.pass) return "mismatch: " + v.failure;
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = argc == 2 ? std::strtoul(argv[1], nullptr, 10) : tests::kVersions.size();
  if (number >= tests::kVersions.size()) {
    fmt::print(stderr, "{}: the number of a version, 0 to {}\n", argv[0], tests::kVersions.size() - 1);
    return 2;
  }
  const tests::Version& version = tests::kVersions[number];
  const Step step = step_of(version);
  Problem p;
  p.seqlen_q = 300, p.seqlen_k = 391, p.head_dim = 64, p.heads = 2, p.kv_heads = 1;
  p.dtype = DType::bf16;
  p.finish();
  const Operation& op = *find_operation(step.operation);
  const HostTensors inputs = draw_inputs(p, op.inputs(p));
  const std::vector<Expected> expected = op.reference(p, inputs, {});
  for (uint64_t schedule = 1; schedule <= 12; ++schedule) {
    emulator::schedule_seed = schedule;
    emulator::early_copies = schedule % 2 == 0;
    Session session(p, op, Backend::emulated, inputs);
    const std::string wrong = run(step, session, expected);
    if (wrong.empty()) continue;
    const bool declared = !version.reason.empty() && wrong.find(version.reason) != std::string::npos;
    fmt::print("schedule {}: {}\n{}\n", schedule, wrong,
               declared ? "noticed" : "not the declared reason: " + version.reason);
    return declared ? 0 : 1;
  }
  fmt::print("twelve schedules pass\n");
  return version.reason.empty() ? 0 : 1;
}
