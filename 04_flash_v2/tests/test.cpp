// Tests of chapter 04, forward: every step on every shape that it accepts, on both back ends.
#include <set>
#include <tuple>

#include "device/roofline.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

// not every step supports the last ones
const std::vector<int64_t> kHeadDims{64, 128, 32, 64, 96, 128, 192, 256};
const std::vector<DType> kDTypes{DType::bf16, DType::fp16, DType::bf16};

// Every third problem has dropout; only the last two forward steps support it.
template <class Body>
void problems(const std::vector<int64_t>& lengths, Body body) {
  int n = 0;
  covering_problems(lengths, kHeadDims, kDTypes, [&](Problem p) {
    if (n++ % 3 == 0) p.dropout = n % 2 == 0 ? 0.25 : 0.1;
    body(p);
  });
}

// The step with all features.
void check_tuned(Problem p, Backend backend) {
  p.finish();
  const Step& step = step_named("v13_tuned");
  INFO(p.text());
  REQUIRE_FALSE(refusal(step, p));
  CHECK(run_step(step, p, backend) == "");
}

// Adds features by the bits of `set`: softcap, ALiBi, dropout.
void add_features(Problem& p, int set, int n) {
  if (set & 1) p.softcap = n % 2 == 0 ? 15 : 50;
  p.alibi = (set & 2) != 0;
  if (set & 4) p.dropout = 0.2;
}
void add_mask(Problem& p, int mask, int n) {
  p.causal = mask == 1;
  if (mask == 2) p.window_left = n * 37 % 150, p.window_right = n * 53 % 90;
}

// (seqlen_q, seqlen_k) of FlashAttention's own tests, except the longest.
constexpr int64_t kOfficial[][2] = {{1, 1},       {64, 128},    {128, 192},  {256, 256}, {239, 1},
                                    {799, 3},     {113, 203},   {113, 128},  {128, 217}, {113, 211},
                                    {108, 256},   {1, 3},       {2, 1},      {511, 1},   {3, 513},
                                    {307, 256},   {256, 512},   {384, 256},  {640, 128}, {512, 256},
                                    {1024, 1024}, {1023, 1024}, {1024, 1023}};

// Problems that contain every pair of shape class, mask, features, heads, head dim and type.
// Returns the number of pairs.
template <class Body>
std::size_t official_problems(int turns, int64_t longest_twice, Body body) {
  constexpr int64_t kDims[] = {64, 128, 96, 256, 32, 192, 128},
                    kHeads[][2] = {{1, 1}, {2, 2}, {6, 2}, {3, 1}, {6, 1}};
  std::set<std::tuple<int, int, int64_t, int64_t>> pairs;
  int n = 0;
  for (int turn = 0; turn < turns; ++turn)
    for (const auto& [q, k] : kOfficial) {
      if (turn > 0 && std::max(q, k) > longest_twice) continue;
      const int choice[] = {n % 3, n % 8, n % 5, n % 7, n % 11 % 2};
      Problem p = problem(q, k, kDims[choice[3]], choice[4] == 0 ? DType::bf16 : DType::fp16);
      p.heads = kHeads[choice[2]][0], p.kv_heads = kHeads[choice[2]][1];
      if (q * k > 300'000 && longest_twice < q) p.heads = p.kv_heads = 1;
      p.seed = static_cast<uint64_t>(++n);
      add_mask(p, choice[0], n);
      add_features(p, choice[1], n);
      for (int a = 0; a < 5; ++a)
        for (int b = 0; b < a; ++b) pairs.insert({a, b, choice[a], choice[b]});
      body(p);
    }
  return pairs.size();
}
constexpr std::size_t kAllPairs =
    3 * 8 + 3 * 5 + 3 * 7 + 3 * 2 + 8 * 5 + 8 * 7 + 8 * 2 + 5 * 7 + 5 * 2 + 7 * 2;

// Every step; the last one with all features as well.
std::vector<std::pair<Step, bool>> plain_and_with_features() {
  std::vector<std::pair<Step, bool>> all;
  for (const Step& step : chapter().steps)
    if (step.deterministic) all.push_back({step, false});
  all.push_back({step_named("v13_tuned"), true});
  return all;
}

// Packed batches: some sequences without queries, some without keys, one without either.
template <class Body>
void packed_problems(Body body) {
  for (int n = 0; n < 24; ++n) {
    constexpr int64_t kDims[] = {64, 128, 256, 96, 32};
    Problem p = problem(1, 1, kDims[n % 5], n % 2 == 0 ? DType::bf16 : DType::fp16);
    p.varlen_q = {0, 1, 64, 113, 0, 129, 5, 2, 0};
    p.varlen_k = {9, 3, 128, 70, 0, 200, 0, 1, 300};
    // the last sequence as well, with no key after it
    if (n % 4 == 1) p.varlen_q = {0, 0, 33}, p.varlen_k = {0, 20, 0};
    if (n % 4 == 3) p.varlen_q = {3, 130, 307}, p.varlen_k = {513, 64, 1};
    p.heads = n % 3 == 0 ? 4 : 2, p.kv_heads = n % 2 + 1;
    p.seed = static_cast<uint64_t>(n) + 1;
    add_mask(p, n % 3, n);
    add_features(p, n < 8 ? 0 : n % 8, n);
    body(p);
  }
}

}  // namespace

// 16-bit types everywhere. The last two steps of each ladder support softcap, packed sequences,
// dropout and any scale, forward ALiBi as well; v13, b7 and b8 have six head dims instead of three.
// All backward steps support packed sequences; b6 supports softcap and dropout. No other step takes
// a scale below 1e-37.
bool attn::tests::promised(const Step& step, const Problem& p) {
  const bool three = one_of(p.head_dim, {32, 64, 128}),
             six = three || one_of(p.head_dim, {96, 192, 256});
  if (p.dtype == DType::fp32) return false;
  if (step.operation == &backward()) {
    if (p.alibi) return false;
    if (one_of_steps(step, {"b7_tuned", "b8_deterministic"})) return six;
    return three && (one_of_steps(step, {"b6_features"}) ||
                     (p.softcap == 0 && p.dropout == 0 && p.softmax_scale >= 1e-37));
  }
  if (one_of_steps(step, {"v13_tuned"})) return six;
  if (one_of_steps(step, {"v12_features"})) return three;
  if (p.softcap != 0 || p.alibi || p.varlen() || !three) return false;
  return p.softmax_scale >= 1e-37 && p.dropout == 0;
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
  CHECK(ran.least('v') >= 10);
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

TEST_CASE("FlashAttention's test shapes with all pairs of features match the reference",
          "[emulated]") {
  const std::size_t pairs =
      official_problems(4, 260, [](const Problem& p) { check_tuned(p, Backend::emulated); });
  CHECK(pairs == kAllPairs);
}

TEST_CASE("packed sequences including empty ones match the reference", "[emulated]") {
  packed_problems([](const Problem& p) { check_tuned(p, Backend::emulated); });
}

TEST_CASE("softmax scales of any sign and size match the reference", "[emulated]") {
  for (const double scale : {-0.3, -1e-3, 1e-50, 1e-38, 2e-37, 0.02, 3.0})
    for (const double softcap : {0.0, 0.5, 1e6}) {
      Problem p = problem(70, 130, 64, DType::bf16);
      p.causal = true;  // -inf times a scale of 0 would be NaN
      p.softmax_scale = scale, p.softcap = softcap;
      if (softcap == 0) check_steps("forward", p, Backend::emulated);
      check_tuned(p, Backend::emulated);
    }
}

TEST_CASE("sliding windows of any width at tile boundaries match the reference", "[emulated]") {
  // Widths 0, 1, around a key tile, and past the end, to each side and to both.
  for (const int64_t width : {0, 1, 63, 64, 65, 127, 128, 129, 500})
    for (int side = 0; side < 3; ++side) {
      Problem p = problem(300, side == 1 ? 420 : 300, 64, DType::bf16, InputKind::needle);
      p.heads = p.kv_heads = 1;
      if (side != 0) p.window_left = width;
      if (side != 1) p.window_right = width;
      check_steps("forward", p, Backend::emulated, in_turn, static_cast<int>(width) + side);
    }
}

TEST_CASE("fully masked rows give O = 0 and lse = -inf", "[emulated]") {
  // More queries than keys: the first rows are fully masked, and so are whole query tiles.
  for (const int64_t d : {64, 96, 128, 256})
    for (const int64_t window_left : {-1, 3}) {
      Problem p = problem(400, 20, d, DType::fp16);
      p.causal = true;
      p.window_left = window_left;
      check_steps("forward", p, Backend::emulated);
    }
}

TEST_CASE("results are bitwise equal under every thread schedule", "[emulated]") {
  for (const auto& [step, features] : plain_and_with_features()) {
    Problem p = problem(140, 300, 64, DType::bf16, InputKind::needle);
    p.causal = true;
    if (features) p.varlen_q = {140, 0, 70}, p.varlen_k = {300, 5, 90}, add_features(p, 7, 0);
    p.finish();
    check_schedules(step, p);
  }
}

TEST_CASE("steps refuse unsupported problems with the reason", "[emulated]") {
  Problem p = problem(8, 8, 96, DType::bf16);
  p.finish();
  CHECK(refusal(step_named("v2_split_q"), p).value().find("32, 64 and 128") != std::string::npos);
  p = problem(8, 8, 64, DType::fp32);
  p.finish();
  CHECK(refusal(step_named("v1_loop_swap"), p).value().find("fp16 and bf16") != std::string::npos);
  p = problem(int64_t{1} << 29, 8, 64, DType::bf16);
  p.heads = p.kv_heads = 1024;
  p.finish();
  CHECK(refusal(step_named("v1_loop_swap"), p).value().find("2^31 - 1 blocks") !=
        std::string::npos);
  for (const char* name : {"v1_loop_swap", "v11_wide_stores"})
    for (const double scale : {-1.0, 1e-50}) {
      p = problem(8, 8, 64, DType::bf16);
      p.softmax_scale = scale;
      p.finish();
      CHECK(refusal(step_named(name), p).value().find("this step takes at least 1e-37") !=
            std::string::npos);
    }
  for (int set = 0; set < 3; ++set) {  // only v12 and v13
    p = problem(8, 8, 64, DType::bf16);
    if (set == 0) p.varlen_q = {8};
    if (set > 0) add_features(p, set, 0);
    p.finish();
    CHECK(refusal(step_named("v11_wide_stores"), p));
    CHECK_FALSE(refusal(step_named("v12_features"), p));
    CHECK_FALSE(refusal(step_named("v13_tuned"), p));
  }
}

TEST_CASE("forward steps need no workspace", "[emulated]") {
  Problem p = problem(1024, 1024, 64, DType::bf16);
  p.finish();
  for (const Step& step : chapter().steps) {
    INFO(step.name);
    if (step.operation == &forward()) CHECK(step.workspaces(p).empty());
  }
}

TEST_CASE("the cost model matches a hand count", "[emulated]") {
  Problem p = problem(1024, 1024, 64, DType::bf16);
  p.finish();
  const Phase all = step_named("v1_loop_swap").cost(p).at(0);
  CHECK(all.exp == 2.0 * 1024 * 1024);
  CHECK(all.tensor_flop == 4.0 * 64 * all.exp);
  // Q and O once, K and V once for each of 8 tiles of 128 queries, two heads.
  CHECK(all.l2_bytes == 2 * (2 * 1024 * 64 * 2 + 1024 * 4 + 8 * 2 * 1024 * 64 * 2));
}

TEST_CASE("all steps match the reference on the GPU", "[gpu]") {
  Counts ran;
  problems(kLengths, [&](Problem p) { ran += check_steps("forward", p, Backend::gpu); });
  CHECK(ran.least('v') >= 47);
  Problem p = problem(2100, 4000, 128, DType::bf16, InputKind::needle);
  p.causal = true;
  check_steps("forward", p, Backend::gpu);
}

TEST_CASE("all features match the reference on the GPU", "[gpu]") {
  CHECK(official_problems(8, 2000, [](const Problem& p) { check_tuned(p, Backend::gpu); }) ==
        kAllPairs);
  packed_problems([](const Problem& p) { check_tuned(p, Backend::gpu); });
  for (const auto& [q, k] : {std::pair<int64_t, int64_t>{2048, 2048}, {4096, 4096}, {4224, 4224}})
    for (int set = 0; set < 8; ++set) {
      Problem p = problem(q, k, set % 2 == 0 ? 128 : 256, DType::bf16);
      p.causal = set % 3 == 1;
      add_features(p, set, set);
      check_tuned(p, Backend::gpu);
    }
  // the GPU flushes denormals to 0
  for (const double scale : {-0.3, 1e-50, 1e-39, 1e-38, 2e-37}) {
    Problem p = problem(70, 130, 64, DType::bf16);
    p.causal = true, p.softmax_scale = scale;
    check_steps("forward", p, Backend::gpu);
  }
}

TEST_CASE("GPU and emulator agree to one rounding of bf16", "[gpu]") {
  Problem p = problem(203, 239, 64, DType::bf16, InputKind::needle);
  p.causal = true;
  p.finish();
  for (const Step& step : chapter().steps) check_back_ends_agree(step, p);
}

TEST_CASE("1000 GPU runs give bitwise equal results", "[gpu]") {
  for (const auto& [step, features] : plain_and_with_features()) {
    Problem p = problem(203, 603, 64, DType::bf16);
    if (features) p.varlen_q = {203, 0, 70}, p.varlen_k = {603, 5, 90}, add_features(p, 7, 0);
    p.finish();
    check_gpu_repeats(step, p);
  }
}

TEST_CASE("the checks of large tensors pass on small tensors", "[emulated]") {
  Problem p = problem(70, 90, 64, DType::bf16);
  for (const char* operation : {"forward", "backward"}) {
    check_large_steps(operation, p, Backend::emulated);
    check_large_steps(operation, small_repeated_problem(), Backend::emulated, kThreeRepeated);
  }
  p.varlen_q = {70, 0, 33}, p.varlen_k = {90, 5, 40};
  for (const char* operation : {"forward", "backward"})
    check_large_steps(operation, p, Backend::emulated);
  p.finish();
  const Operation& op = forward();
  const HostTensors inputs = repeated_inputs(p, op.inputs(p));
  CHECK(inputs.at("q").data[0] != inputs.at("k").data[0]);
  std::vector<Expected> expected = op.reference(p, inputs, {});
  Session session(p, op, Backend::emulated, inputs);
  REQUIRE(session.prepare(step_named("v13_tuned")).ok());
  REQUIRE(session.launch().ok());
  CHECK(check_rows(session, expected) == "");
  expected[0].rows[40].i += 1;  // a row other than the expected one
  CHECK(check_rows(session, expected).find("in memory this row is") != std::string::npos);
}

TEST_CASE("tensors of more than 2^31 elements", "[gpu][large]") {
  for (const Problem& p : large_problems()) check_large_steps("forward", p, Backend::gpu);
}
