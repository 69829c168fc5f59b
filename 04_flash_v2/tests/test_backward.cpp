// Tests of chapter 04, backward.
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
const char* const kTuned[] = {"b7_tuned", "b8_deterministic"};  // the steps with all features

void check_tuned(Problem p, Backend backend) {
  p.finish();
  const Case both(p, backward());
  for (const char* name : kTuned) {
    const Step& step = step_named(name);
    INFO(name << ": " << p.text());
    REQUIRE_FALSE(refusal(step, p));
    CHECK(run_step(step, both, backend) == "");
  }
}

// Features by the bits of `set`: softcap, dropout.
void add_features(Problem& p, int set, int n) {
  if (set & 1) p.softcap = n % 2 == 0 ? 15 : 2;
  if (set & 2) p.dropout = n % 2 == 0 ? 0.2 : 0.5;
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

// Problems that contain every pair of mask, features, heads, head dim and type. Returns the number
// of pairs.
template <class Body>
std::size_t official_problems(int turns, int64_t longest, Body body) {
  constexpr int64_t kDims[] = {64, 128, 96, 256, 32, 192, 128},
                    kHeads[][2] = {{1, 1}, {2, 2}, {6, 2}, {3, 1}, {4, 1}};
  std::set<std::tuple<int, int, int, int>> pairs;
  int n = 0;
  for (int turn = 0; turn < turns; ++turn)
    for (const auto& [q, k] : kOfficial) {
      if (std::max(q, k) > longest) continue;
      const int choice[] = {n % 3, n % 4, n % 5, n % 7, n % 11 % 2};
      Problem p = problem(q, k, kDims[choice[3]], choice[4] == 0 ? DType::bf16 : DType::fp16,
                          n % 3 == 0 ? InputKind::needle : InputKind::random);
      p.heads = kHeads[choice[2]][0], p.kv_heads = kHeads[choice[2]][1];
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
    3 * 4 + 3 * 5 + 3 * 7 + 3 * 2 + 4 * 5 + 4 * 7 + 4 * 2 + 5 * 7 + 5 * 2 + 7 * 2;

// Packed batches: some sequences without queries, some without keys, one without either.
template <class Body>
void packed_problems(int count, Body body) {
  for (int n = 0; n < count; ++n) {
    constexpr int64_t kDims[] = {64, 128, 256, 96, 32};
    Problem p = problem(1, 1, kDims[n % 5], n % 2 == 0 ? DType::bf16 : DType::fp16);
    p.varlen_q = {0, 1, 64, 113, 0, 129, 5, 2, 0};
    p.varlen_k = {9, 3, 128, 70, 0, 200, 0, 1, 300};
    // the last sequence as well, with no key after it
    if (n % 4 == 1) p.varlen_q = {0, 0, 33}, p.varlen_k = {0, 20, 0};
    if (n % 4 == 3) p.varlen_q = {3, 130, 307}, p.varlen_k = {413, 64, 1};
    p.heads = n % 3 == 0 ? 4 : 2, p.kv_heads = n % 2 + 1;
    p.seed = static_cast<uint64_t>(n) + 1;
    add_mask(p, n % 3, n);
    add_features(p, n % 4, n);
    body(p);
  }
}

// The largest difference of two tensors, relative to the largest element.
double distance(const HostTensor& a, const HostTensor& b) {
  double most = 0, size = 0;
  for (std::size_t i = 0; i < a.data.size(); ++i) {
    most = std::max(most, std::abs(double{a.data[i]} - double{b.data[i]}));
    size = std::max(size, std::abs(double{b.data[i]}));
  }
  return most / size;
}

}  // namespace

TEST_CASE("backward steps match the reference on short problems", "[emulated]") {
  int n = 0;
  Counts ran;
  covering_problems(kShortLengths, kHeadDims, kDTypes, [&](Problem p) {
    if (n % 3 == 0) p.dropout = n % 2 == 1 ? 0.25 : 0.1;
    ran += check_steps("backward", p, Backend::emulated, in_turn, turn(n));
    ++n;
  });
  CHECK(ran.least('b') >= 10);
}

TEST_CASE("backward: all pairs of features match the reference", "[emulated]") {
  CHECK(official_problems(6, 260, [](const Problem& p) { check_tuned(p, Backend::emulated); }) ==
        kAllPairs);
}

TEST_CASE("backward: packed sequences including empty ones", "[emulated]") {
  Counts ran;
  packed_problems(12, [&](Problem p) {
    ran += check_steps("backward", p, Backend::emulated);
    if (p.softcap == 0 && p.dropout == 0) return;
    p.softcap = p.dropout = 0;  // for the steps that support neither
    ran += check_steps("backward", p, Backend::emulated, [](const Step& step, int) {
      return !one_of_steps(step, {"b6_features", "b7_tuned", "b8_deterministic"});
    });
  });
  CHECK(ran.least('b') >= 8);
}

TEST_CASE("backward: softmax scales of any sign and size", "[emulated]") {
  for (const double scale : {-0.3, 1e-50, 1e-38, 2e-37, 3.0})
    for (const double softcap : {0.0, 0.5, 1e6}) {
      Problem p = problem(70, 130, 64, DType::bf16);
      p.causal = true;  // -inf times a scale of 0 would be NaN
      p.heads = p.kv_heads = 1;
      p.softmax_scale = scale, p.softcap = softcap;
      check_tuned(p, Backend::emulated);
    }
}

TEST_CASE("backward: sliding windows of any width at tile boundaries", "[emulated]") {
  // Widths 0, 1, around a query or key tile, and past the end, to each side and to both.
  for (const int64_t width : {0, 1, 63, 64, 65, 127, 128, 129, 500})
    for (int side = 0; side < 3; ++side) {
      Problem p =
          problem(side == 2 ? 330 : 270, side == 1 ? 330 : 270, 64, DType::bf16, InputKind::needle);
      p.heads = p.kv_heads = 1;
      if (side != 0) p.window_left = width;
      if (side != 1) p.window_right = width;
      p.seed = static_cast<uint64_t>(width) + 1;
      check_steps("backward", p, Backend::emulated, in_turn, static_cast<int>(width) + side);
    }
}

TEST_CASE("backward: fully masked rows and keys that no row attends to", "[emulated]") {
  for (const int64_t d : {64, 128, 256})
    for (const int64_t window_left : {-1, 3}) {
      Problem rows = problem(300, 20, d, DType::fp16), keys = problem(20, 300, d, DType::fp16);
      rows.causal = true, rows.window_left = window_left;
      // at least the first 277
      keys.window_left = std::max<int64_t>(window_left, 0), keys.window_right = 0;
      check_steps("backward", rows, Backend::emulated);
      check_steps("backward", keys, Backend::emulated);
    }
}

TEST_CASE("backward: dK and dV sum over the query heads of a KV head", "[emulated]") {
  // One and several query tiles for each.
  int problems = 0;
  for (const int64_t d : {32, 64, 128}) {
    for (const auto& [heads, kv_heads] : {std::pair<int64_t, int64_t>{7, 1}, {4, 2}, {3, 3}})
      for (const int64_t n : {40, 150}) {
        Problem p = problem(n, 20, d, DType::bf16);
        p.heads = heads, p.kv_heads = kv_heads, p.batch = heads == 3 ? 2 : 1;
        check_steps("backward", p, Backend::emulated, in_turn, problems++);
      }
    ++problems;  // other head counts for the next head dim
  }
}

TEST_CASE("backward: keys past the end have no weight when all scores are near -500",
          "[emulated]") {
  for (const int64_t d : {64, 128, 256}) check_far_scores(problem(70, 140, d, DType::bf16));
}

TEST_CASE("b8 accumulates several key tiles per slice", "[emulated]") {
  // 44 heads: three slices for six key tiles, two tiles each. 132 heads: one slice.
  for (const auto& [heads, keys] : {std::pair<int64_t, int64_t>{44, 700}, {132, 260}}) {
    Problem p = problem(20, keys, 32, DType::bf16);
    p.heads = p.kv_heads = heads;
    p.causal = true;
    p.finish();
    const int64_t slices = heads == 44 ? 3 : 1;
    CHECK(step_named("b8_deterministic").workspaces(p).at(0).bytes ==
          slices * heads * 128 * 32 * 4);
    CHECK(run_step(step_named("b8_deterministic"), p, Backend::emulated) == "");
  }
}

TEST_CASE("backward steps refuse unsupported problems with the reason", "[emulated]") {
  const auto reason = [](const char* step, Problem p) {
    p.finish();
    return refusal(step_named(step), p).value_or("");
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  Problem p = problem(8, 8, 96, DType::bf16);
  CHECK(has(reason("b1_kv_parallel", p), "32, 64 and 128"));
  p.head_dim = 48;
  CHECK(has(reason("b7_tuned", p), "32, 64, 96, 128, 192 and 256"));
  p = problem(8, 8, 64, DType::fp32);
  CHECK(has(reason("b7_tuned", p), "fp16 and bf16"));
  p = problem(8, 8, 64, DType::bf16);
  p.softmax_scale = -1;
  CHECK(has(reason("b1_kv_parallel", p), "--scale -1: this step takes at least 1e-37"));
  CHECK(reason("b7_tuned", p) == "");
  p = problem(8, 8, 64, DType::bf16);
  p.alibi = true;
  for (const char* step : kTuned) CHECK(reason(step, p) == "--alibi: this step has no ALiBi");
  p = problem(8, int64_t{1} << 29, 64, DType::bf16);
  p.heads = p.kv_heads = 1024;
  for (const char* step : kTuned) CHECK(has(reason(step, p), "2^31 - 1 blocks"));
}

TEST_CASE("the cost model of the backward pass matches a hand count", "[emulated]") {
  Problem p = problem(1024, 1024, 128, DType::bf16);
  p.finish();
  const Cost cost = step_named("b7_tuned").cost(p);
  REQUIRE(cost.size() == 3);
  CHECK(cost[1].exp == 2.0 * 1024 * 1024);
  CHECK(cost[1].tensor_flop == 10.0 * 128 * cost[1].exp);
  // 8 key tiles: each loads all of Q, dO, lse and D, and adds to all of dQ; K, V, dK and dV move
  // once.
  CHECK(cost[1].l2_bytes == 2 * (8 * 1024 * (2 * 128 * 2 + 8 + 128 * 4) + 4 * 1024 * 128 * 2));
  CHECK(step_named("b8_deterministic").cost(p)[2].hbm_read == 8 * cost[2].hbm_read);
  p.causal = true;  // of 16 x 8 tiles of 64 rows and 128 keys
  CHECK(step_named("b7_tuned").cost(p)[1].exp ==
        2.0 * 64 * 128 * (2 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)));
}

TEST_CASE("dK and dV are bitwise equal under every thread schedule and dQ to rounding",
          "[emulated]") {
  for (const char* name : {"b1_kv_parallel", "b4_staggered_dq", "b7_tuned"}) {
    Problem p = problem(140, 300, 64, DType::bf16, InputKind::needle);
    p.causal = true;
    p.finish();
    const Operation& op = backward();
    HostTensors first;
    for (uint64_t seed = 100; seed < 104; ++seed) {
      Session session(p, op, Backend::emulated, draw_inputs(p, op.inputs(p)));
      emulator::schedule_seed = seed;
      REQUIRE(session.prepare(step_named(name)).ok());
      REQUIRE(session.launch().ok());
      const HostTensors now = session.outputs();
      if (seed == 100) first = now;
      INFO(name << " under schedule " << seed);
      CHECK(now.at("dk").data == first.at("dk").data);
      CHECK(now.at("dv").data == first.at("dv").data);
      CHECK(distance(now.at("dq"), first.at("dq")) < 0x1p-7);
    }
  }
}

// b8 with every feature, also with several key tiles per slice: the same bits in every run.
void check_repeats(Backend backend, int repeats) {
  Problem p = problem(1, 1, 32, DType::bf16);
  p.varlen_q = {50, 0, 70, 140}, p.varlen_k = {420, 5, 90, 20};
  p.heads = p.kv_heads = 11;
  p.causal = true, p.softcap = 15, p.dropout = 0.2;
  p.finish();
  const Operation& op = backward();
  Session session(p, op, backend, draw_inputs(p, op.inputs(p)));
  REQUIRE(session.prepare(step_named("b8_deterministic")).ok());
  CHECK(session.repeats_differ(repeats, [](int n) {
    emulator::schedule_seed = 100 + static_cast<uint64_t>(n);
  }) == "");
}
TEST_CASE("b8 with all features is bitwise equal under every thread schedule", "[emulated]") {
  check_repeats(Backend::emulated, 5);
}
TEST_CASE("1000 GPU runs of b8 with all features give bitwise equal results", "[gpu]") {
  check_repeats(Backend::gpu, 1000);
}

TEST_CASE("all backward steps match the reference on the GPU", "[gpu]") {
  int n = 0;
  Counts ran;
  covering_problems(kLengths, kHeadDims, kDTypes, [&](Problem p) {
    if (n++ % 3 == 0) p.dropout = n % 2 == 0 ? 0.25 : 0.1;
    ran += check_steps("backward", p, Backend::gpu);
  });
  CHECK(ran.least('b') >= 47);
  CHECK(official_problems(6, 2000, [](const Problem& p) { check_tuned(p, Backend::gpu); }) ==
        kAllPairs);
  packed_problems(24, [](const Problem& p) { check_tuned(p, Backend::gpu); });
  for (int set = 0; set < 4; ++set) {
    constexpr int64_t kLong[][2] = {{2100, 4000}, {4096, 4096}, {4224, 4224}, {3000, 2500}};
    Problem p = problem(kLong[set][0], kLong[set][1], set % 2 == 0 ? 128 : 64, DType::bf16);
    p.causal = set % 3 == 1;
    add_features(p, set, set);
    check_tuned(p, Backend::gpu);
  }
  // the GPU flushes denormals to 0
  for (const double scale : {-0.3, 1e-50, 1e-39, 1e-38, 2e-37}) {
    Problem p = problem(70, 130, 64, DType::bf16);
    p.causal = true, p.softmax_scale = scale;
    check_tuned(p, Backend::gpu);
  }
}

TEST_CASE("gradients of tensors of more than 2^31 elements", "[gpu][large]") {
  for (const Problem& p : large_problems()) check_large_steps("backward", p, Backend::gpu);
}
