// Runs one step of which a line was changed, in the emulator: exits with 0 if it fails, with 1 if nobody notices.
#include <fmt/format.h>

#include "attn/check.h"
#include "attn/inputs.h"
#include "attn/session.h"
#include "emulator/simt.h"

ATTN_DECLARE_STEP(ATTN_BROKEN_STEP);

int main() {
  using namespace attn;
  Problem p;
  p.seqlen_q = 300, p.seqlen_k = 391, p.head_dim = 64, p.heads = 2, p.kv_heads = 1;
  p.dtype = DType::bf16;
  p.finish();
  Step step;
  step.name = "broken";
  step.operation = "forward";
  step.refuses = [](const Problem&) { return std::nullopt; };
  step.workspaces = [](const Problem&) { return std::vector<Workspace>{{"queue", 4, true}}; };
  step.prepare.emulated = [](const Arguments& args) {  // for steps that take tiles of queries from a queue
    *args.out<unsigned>("queue") = 0;
    return Status{};
  };
  step.launch.emulated = emulated::ATTN_BROKEN_STEP::launch;
  const Operation& op = *find_operation(step.operation);
  const HostTensors inputs = draw_inputs(p, op.inputs(p));
  const std::vector<Expected> expected = op.reference(p, inputs, {});
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    emulator::schedule_seed = seed;
    emulator::early_copies = seed % 2 == 0;
    Session session(p, op, Backend::emulated, inputs);
    std::string wrong = session.prepare(step).message;
    if (wrong.empty()) wrong = session.launch().message;
    if (wrong.empty()) wrong = session.damage().value_or("");
    for (const Expected& e : expected)
      if (wrong.empty()) wrong = check(session.outputs().at(e.spec.name), e).failure;
    if (!wrong.empty()) {
      fmt::print("noticed, schedule {}: {}\n", seed, wrong);
      return 0;
    }
  }
  fmt::print("nobody noticed\n");
  return 1;
}
