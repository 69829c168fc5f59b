// Every step of chapter 03 on every shape that it accepts, on the emulator and on the GPU.
#include "attn/philox.h"
#include "device/roofline.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

const std::vector<int64_t> kHeadDims{64, 128, 32};
const std::vector<DType> kDTypes{DType::bf16, DType::fp16, DType::bf16, DType::fp32};

// Every third problem has dropout.
template <class Body>
void problems(const std::vector<int64_t>& lengths, Body body) {
  int n = 0;
  covering_problems(lengths, kHeadDims, kDTypes, [&](Problem p) {
    if (n++ % 3 == 0) p.dropout = n % 2 == 0 ? 0.25 : 0.1;
    body(p);
  });
}

}  // namespace

// Steps with compile-time tiles take 16-bit types and three head dims; v10 and b3 to b7 also need a
// scale of at least 1e-37. The others take any type and any head dim up to 128. All have dropout
// and no other feature.
bool attn::tests::promised(const Step& step, const Problem& p) {
  if (p.softcap != 0 || p.alibi || p.varlen()) return false;
  if (one_of_steps(step, {"v1_scalar", "v1_half_m", "v1_double_m", "b1_scalar", "b2_saved_dot"}))
    return p.head_dim <= 128;
  const bool any_scale = one_of_steps(
      step, {"v2_constant_tiles", "v3_register_scores", "v4_split_keys", "v5_tensor_core",
             "v6_async", "v7_grid", "v8_warp_pair_barriers", "v9_rows_per_warp"});
  return p.dtype != DType::fp32 && one_of(p.head_dim, {32, 64, 128}) &&
         (any_scale || p.softmax_scale >= 1e-37);
}

TEST_CASE("Philox matches the published known answers", "[philox]") {
  // Known answers of the Random123 distribution for philox4x32-10.
  const auto words = [](PhiloxBits b) { return std::vector<uint32_t>(b.word, b.word + 4); };
  CHECK(words(philox4x32(0, 0, 0, 0, 0)) ==
        std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(words(philox4x32(~0u, ~0u, ~0u, ~0u, ~uint64_t{0})) ==
        std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(words(philox4x32(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0x299f31d0a4093822)) ==
        std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("dropout drops the given share and each column uses its own byte", "[philox]") {
  int dropped = 0;
  for (int row = 0; row < 128; ++row)
    for (int col = 0; col < 512; ++col) dropped += !dropout_keeps(7, 3, row, col, 64);
  CHECK(dropped == Approx(128 * 512 / 4).margin(500));  // 4.5 standard deviations
  // One call covers 16 columns, and 4 calls cover 64 columns, each exactly once.
  std::vector<int> uses(64);
  for (int col = 0; col < 64; ++col)
    ++uses[static_cast<std::size_t>(dropout_quad(col) * 16 + dropout_byte(col))];
  CHECK(uses == std::vector<int>(64, 1));
}

TEST_CASE("steps drop the same probabilities as the reference bit for bit", "[emulated]") {
  check_dropped();
}

TEST_CASE("forward steps match the reference on short problems", "[emulated]") {
  Counts ran;
  int n = 0;
  problems(kShortLengths, [&](Problem p) {
    ran += check_steps("forward", p, Backend::emulated, in_turn, turn(n));
    ++n;
  });
  CHECK(ran.least('v') >= 19);
}

TEST_CASE("backward steps match the reference on short problems", "[emulated]") {
  int n = 0;
  Counts ran;
  problems(kShortLengths, [&](Problem p) {
    ran += check_steps("backward", p, Backend::emulated, in_turn, turn(n));
    ++n;
  });
  CHECK(ran.least('b') >= 19);
}

TEST_CASE("backward steps match the reference on long problems", "[emulated]") {
  for (const int64_t n : {239, 511, 512, 799})
    check_steps("backward",
                one_head(problem(n, n, n % 2 == 0 ? 64 : 32, DType::bf16, InputKind::needle)),
                Backend::emulated);
  Problem causal = problem(300, 260, 128, DType::fp16, InputKind::peaked);
  causal.causal = true;
  causal.dropout = 0.1;
  causal.heads = 4, causal.kv_heads = 2;
  check_steps("backward", causal, Backend::emulated);
}

TEST_CASE("gradients that cancel to rounding errors are within their error bound", "[emulated]") {
  // At (4, 176) dP and D cancel to a hundredth of their terms, and then cancel each other.
  Problem p = problem(239, 1023, 128, DType::fp32, InputKind::needle);
  p.heads = 7, p.kv_heads = 1, p.window_left = 0, p.window_right = 5, p.seed = 104;
  check_steps("backward", p, Backend::emulated);
}

TEST_CASE("forward steps match the reference on long problems", "[emulated]") {
  for (const int64_t n : {239, 511, 512, 799})
    check_steps("forward",
                one_head(problem(n, n, n % 2 == 0 ? 64 : 32, DType::bf16, InputKind::needle)),
                Backend::emulated);
  Problem causal = problem(300, 500, 128, DType::fp16, InputKind::peaked);
  causal.causal = true;
  causal.dropout = 0.1;
  check_steps("forward", causal, Backend::emulated);
}

TEST_CASE("results are bitwise equal under every thread schedule", "[emulated]") {
  for (const Step& step : chapter().steps) {
    Problem p = problem(140, 300, 64, DType::bf16, InputKind::needle);
    p.causal = true;
    p.finish();
    check_schedules(step, p);
  }
}

TEST_CASE("steps refuse unsupported problems with the reason", "[emulated]") {
  Problem p = problem(8, 8, 96, DType::bf16);
  p.finish();
  CHECK(refusal(step_named("v5_tensor_core"), p).value().find("32, 64 and 128") !=
        std::string::npos);
  CHECK_FALSE(refusal(step_named("v1_scalar"), p));
  p = problem(8, 8, 64, DType::fp32);
  p.finish();
  CHECK(refusal(step_named("v8_warp_pair_barriers"), p).value().find("fp16 and bf16") !=
        std::string::npos);
  p = problem(8, 8, 129, DType::fp32);
  p.finish();
  CHECK(refusal(step_named("v1_scalar"), p).value().find("at most 128") != std::string::npos);
}

TEST_CASE("memory need is linear in the length", "[emulated]") {
  Problem p = problem(1024, 1024, 64, DType::bf16);
  p.finish();
  Problem twice = problem(2048, 2048, 64, DType::bf16);
  twice.finish();
  for (const Step& step : chapter().steps) {
    const Operation& op = *step.operation;
    INFO(step.name);
    CHECK(memory_need(twice, op, step).total() < 2.01 * memory_need(p, op, step).total());
  }
}

TEST_CASE("all steps match the reference on the GPU", "[gpu]") {
  Counts ran;
  problems(kLengths, [&](Problem p) {
    ran += check_steps("forward", p, Backend::gpu);
    ran += check_steps("backward", p, Backend::gpu);
  });
  CHECK(ran.least('v') >= 83);
  CHECK(ran.least('b') >= 83);
  Problem p = problem(2100, 4000, 128, DType::bf16, InputKind::needle);
  p.causal = true;
  check_steps("forward", p, Backend::gpu);
  check_steps("backward", p, Backend::gpu);
}

TEST_CASE("GPU and emulator agree to one rounding of bf16", "[gpu]") {
  Problem p = problem(203, 239, 64, DType::bf16, InputKind::needle);
  p.causal = true;
  p.finish();
  for (const Step& step : chapter().steps) check_back_ends_agree(step, p);
}

TEST_CASE("1000 GPU runs give bitwise equal results", "[gpu]") {
  Problem p = problem(203, 603, 64, DType::bf16);
  p.finish();
  for (const Step& step : chapter().steps) {
    if (!step.deterministic) continue;
    check_gpu_repeats(step, p);
  }
}

TEST_CASE("the checks of large tensors pass on small tensors", "[emulated]") {
  for (const char* operation : {"forward", "backward"})
    check_large_steps(operation, small_repeated_problem(), Backend::emulated, kThreeRepeated);
}

TEST_CASE("tensors of more than 2^31 elements", "[gpu][large]") {
  for (const Problem& p : large_problems())
    for (const char* operation : {"forward", "backward"})
      check_large_steps(operation, p, Backend::gpu);
}
