// What chapter 06 promises: every step right on every shape that it accepts, on both back ends.
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

const std::vector<int64_t> kShort{1, 17, 64, 65, 113, 127, 129, 203};
const std::vector<int64_t> kHeadDims{64, 128, 64, 256};
const std::vector<DType> kDTypes{DType::bf16, DType::fp16, DType::bf16};

}  // namespace

TEST_CASE("steps are right on short problems", "[emulated]") {
  int ran = 0, n = 0;
  covering_problems(kShort, kHeadDims, kDTypes, [&](Problem p) {
    if (n++ % 3 != 0 && p.head_dim == 256) return;  // slow
    ran += check_steps("forward", p, Backend::emulated);
  });
  CHECK(ran > 100);
}

TEST_CASE("steps are right on several blocks of queries and of keys", "[emulated]") {
  Problem p = problem(150, 395, 64, DType::bf16, InputKind::needle);
  p.heads = 2, p.kv_heads = 1, p.causal = true;
  check_steps("forward", p, Backend::emulated);
  p = problem(300, 290, 128, DType::fp16, InputKind::peaked);
  p.heads = p.kv_heads = 1, p.window_left = 130, p.window_right = 40;
  check_steps("forward", p, Backend::emulated);
}

TEST_CASE("all steps on the GPU", "[gpu]") {
  int ran = 0;
  covering_problems(kLengths, kHeadDims, kDTypes, [&](const Problem& p) { ran += check_steps("forward", p, Backend::gpu); });
  CHECK(ran >= 100);
  for (const int64_t d : {64, 128, 256}) {
    Problem p = problem(2100, 4000, d, DType::bf16, InputKind::needle);
    p.causal = true;
    check_steps("forward", p, Backend::gpu);
  }
}

TEST_CASE("1000 repeats give the same bits", "[gpu]") {
  Problem p = problem(1203, 1603, 128, DType::bf16);
  p.finish();
  for (const Step& step : chapter().steps) {
    const Operation& op = *find_operation(step.operation);
    Session session(p, op, Backend::gpu, draw_inputs(p, op.inputs(p)));
    INFO(step.name);
    REQUIRE(session.prepare(step).ok());
    REQUIRE(session.launch().ok());
    const HostTensors first = session.outputs();
    for (int i = 0; i < 1000; ++i) REQUIRE(session.launch().ok());
    for (const auto& [name, t] : session.outputs()) CHECK(t.data == first.at(name).data);
  }
}
