/// \file
/// What a step's model says its tensor cores do, against what they do in the emulator. Linked into every chapter's
/// tests: tiles that are copied into a model by hand, and drift, fail here.
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

// Operations of the products of one launch.
double products_of(const Step& step, const Problem& p) {
  const Operation& op = *find_operation(step.operation);
  emulator::schedule_seed = p.seed;
  Session session(p, op, Backend::emulated, draw_inputs(p, op.inputs(p)));
  REQUIRE(session.prepare(step).ok());
  const std::uint64_t before = emulator::tensor_flop;
  REQUIRE(session.launch().ok());
  return static_cast<double>(emulator::tensor_flop - before);
}

}  // namespace

TEST_CASE("models count the operations that tensor cores do", "[emulated][model]") {
  std::vector<Problem> problems;
  // Masks that skip tiles, and what makes a launch choose other tiles. Lengths are multiples of every step's tiles (768
  // of 192 and 256): in a tile that is cut some steps leave out warps without rows, which no model follows.
  for (const int64_t d : {32, 64, 128, 256}) {
    const int64_t n = d == 64 ? 768 : 256;
    Problem p = problem(n, n, d, DType::bf16);
    p.batch = 1, p.heads = p.kv_heads = 1;
    problems.push_back(p);
    p.causal = true;
    problems.push_back(p);
    p.softcap = 20;
    problems.push_back(p);
  }
  problems.push_back(problem(256, 512, 64, DType::fp16));
  problems.back().window_left = 100, problems.back().window_right = 7;
  for (Problem p : problems) {
    p.finish();
    for (const Step& step : chapter().steps) {
      if (refusal(step, p)) continue;
      double model = 0;
      for (const Phase& phase : cost_of(step, p)) model += phase.tensor_flop;
      if (model == 0) continue;
      const double done = products_of(step, p);
      if (done == 0) continue;  // a library does them
      INFO(step.name << ": " << p.text());
      CHECK(model == done);
    }
  }
}
