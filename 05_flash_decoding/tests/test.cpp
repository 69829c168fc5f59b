// Tests of chapter 05: every step matches the reference for every cache, on both back ends.
#include <cmath>
#include <numeric>

#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

bool promised_of_ranks(const Step&, const Problem&);  // test_ranks.cpp

namespace {

const std::vector<int64_t> kLengths05{1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 1000};

// Query and K/V heads: group sizes that are a row tile of some step, and others.
constexpr int64_t kHeads[][2] = {{1, 1}, {3, 1}, {4, 1}, {7, 1}, {8, 1}, {16, 1}, {2, 2}, {6, 2}};
constexpr int64_t kQueries[] = {1, 1, 2, 1, 4, 1, 8, 16};

// The model of v6 and v7 would choose one split for the few keys of a test.
Problem split(Problem p, const Step& step) {
  if (std::ranges::find(step.takes, "num_splits") != step.takes.end())
    p.own["num_splits"] = {static_cast<double>(2 + p.seqlen_k % 4)};
  return p;
}

// The steps without ranks (those of several GPUs: test_ranks.cpp).
const std::vector<Step>& on_one_gpu() {
  static const std::vector<Step> steps = [] {
    std::vector<Step> some;
    for (const Step& step : chapter().steps)
      if (!takes(step, "devices")) some.push_back(step);
    return some;
  }();
  return steps;
}

// Decode problems: every length with every mask; all other parameters in pairs.
template <class Body>
void decode_problems(const std::vector<int64_t>& lengths, Body body) {
  constexpr InputKind kInputs[] = {InputKind::needle, InputKind::random, InputKind::peaked,
                                   InputKind::outlier, InputKind::needle};
  constexpr int64_t kDims[] = {128, 64, 128, 256, 64, 128, 256};
  std::size_t n = 0;
  for (const int64_t room : lengths)
    for (int mask = 0; mask < 3; ++mask, ++n) {
      Problem p = problem(kQueries[n % 8], room, kDims[n % 7],
                          n % 2 == 0 ? DType::bf16 : DType::fp16, kInputs[n % 5]);
      p.heads = kHeads[n * 5 % 8][0], p.kv_heads = kHeads[n * 5 % 8][1];
      p.causal = mask == 1;
      if (mask == 2) p.window_left = static_cast<int64_t>(n * 37 % 150), p.window_right = 0;
      if (n % 3 != 0) {  // partly used, with NaN past the end; a sequence may be empty
        p.batch = 3;
        p.seqused_k = {room, room / 2, static_cast<int64_t>(n) % (room + 1)};
        if (n % 5 == 0) p.seqused_k[1] = 0;
      }
      p.seed = n + 1;
      body(p);
    }
}

}  // namespace

// 16-bit types, three head dims, up to 16 queries; causal and window masks; features in v16.
bool attn::tests::promised(const Step& step, const Problem& p) {
  const bool features = one_of_steps(step, {"v16_features"});
  if (takes(step, "devices") || p.own.contains("devices")) return promised_of_ranks(step, p);
  if (p.own.contains("num_splits") && !one_of_steps(step, {"v6_heuristic", "v7_fused_combine"}))
    return false;
  if (p.own.contains("split_keys") && !features &&
      !one_of_steps(step, {"v13_even_splits", "v14_unified_max", "v15_wgmma"}))
    return false;
  return p.dtype != DType::fp32 && one_of(p.head_dim, {64, 128, 256}) && p.seqlen_q <= 16 &&
         !p.varlen() && p.dropout == 0 && !p.mask && (features || (p.softcap == 0 && !p.alibi));
}

TEST_CASE("steps match the reference for caches of any length", "[emulated]") {
  Counts ran;
  int n = 0;
  decode_problems(kLengths05, [&](const Problem& p) {
    ran += check_steps("decode", p, Backend::emulated, in_turn, turn(n++));
  });
  CHECK(n == 39);
  for (const Step& step : on_one_gpu()) CHECK(ran.of[step.name] >= n / 3);
}

namespace {
// Softcap and ALiBi with every mask and head dim, up to scores that saturate the cap.
void features(Backend backend, const std::vector<int64_t>& lengths) {
  Counts ran;
  std::size_t n = 0;
  decode_problems(lengths, [&](Problem p) {
    p.softcap = n % 3 == 0 ? 0 : n % 3 == 1 ? 15 : 0.5f;
    p.alibi = n % 3 != 1;
    ++n;
    ran += check_steps("decode", p, backend);
  });
  CHECK(ran.of["v16_features"] == 3 * static_cast<int>(lengths.size()));
}
}  // namespace
TEST_CASE("softcap and ALiBi match the reference", "[emulated]") {
  features(Backend::emulated, kLengths05);
}
TEST_CASE("softcap and ALiBi match the reference on the GPU", "[gpu]") {
  features(Backend::gpu, {17, 1000, 32789});
}

TEST_CASE("any number of splits matches the reference", "[emulated]") {
  Counts ran;
  int n = 0;
  decode_problems(kLengths05, [&](Problem p) {
    p.own["num_splits"] = {static_cast<double>(1 + n++ % 9)};
    ran += check_steps("decode", p, Backend::emulated);
  });
  CHECK(ran.of["v6_heuristic"] == 39);
  CHECK(ran.of["v7_fused_combine"] == 39);
}

TEST_CASE("a batch of empty caches gives O = 0 and lse = -inf", "[emulated]") {
  Problem p = problem(2, 100, 64, DType::bf16);
  p.batch = 3, p.heads = 4, p.kv_heads = 2;
  p.seqused_k = {0, 0, 0};
  p.finish();
  for (const Step& step : on_one_gpu()) {
    HostTensors out;
    INFO(step.name);
    CHECK(run_step(step, p, Backend::emulated, &out) == "");
    for (const float x : out.at("o").data) CHECK(x == 0);
    for (const float x : out.at("lse").data) CHECK((std::isinf(x) && x < 0));
  }
}

TEST_CASE("batches of more sequences than lanes match the reference", "[emulated]") {
  Problem p = problem(1, 300, 64, DType::bf16);
  p.batch = 70, p.heads = 2, p.kv_heads = 1;
  for (int64_t b = 0; b < 70; ++b) p.seqused_k.push_back(b % 5 == 0 ? 0 : b * 37 % 301);
  check_steps("decode", p, Backend::emulated);
}

TEST_CASE("a partly used cache is read only up to its length", "[emulated]") {
  for (const int64_t used : {1, 17, 129}) {
    Problem p = problem(1, 3000, 128, DType::bf16);
    p.heads = 4, p.kv_heads = 1;
    p.seqused_k = {used};
    p.seed = static_cast<uint64_t>(used);
    check_steps("decode", p, Backend::emulated);  // most splits are empty
  }
}

TEST_CASE("results are bitwise equal under every thread schedule", "[emulated]") {
  for (const Step& step : on_one_gpu()) {
    if (!step.deterministic) continue;
    Problem p = problem(2, 900, 64, DType::bf16);
    p.batch = 2, p.heads = 4, p.kv_heads = 1, p.causal = true;
    p.seqused_k = {900, 333};
    p = split(p, step);
    p.finish();
    check_schedules(step, p);
  }
}

namespace {
// Replays of a captured launch (a CUDA graph on a GPU): each finds other lengths on the device, and
// the counters as the previous launch left them.
void replay(const Step& step, Problem p, Backend backend) {
  p.finish();
  Session session(p, *step.operation, backend, draw(*step.operation, p).tensors);
  REQUIRE(session.prepare(step).ok());
  REQUIRE(session.capture().ok());
  for (const auto& lengths : std::vector<std::vector<int64_t>>{{900, 250, 0},
                                                               {900, 250, 0},
                                                               {0, 0, 0},
                                                               {3, 800, 130},
                                                               {3, 800, 130},
                                                               {900, 900, 900}}) {
    p.seqused_k = lengths;
    HostTensors expected;
    INFO(step.name << " with lengths " << lengths[0] << ", " << lengths[1] << ", " << lengths[2]);
    CHECK(run_step(step, p, backend, &expected) == "");
    session.replace(draw(*step.operation, p).tensors);
    CHECK(session.launch().ok());
    for (const auto& [name, t] : session.outputs()) CHECK(same(t, expected.at(name)));
    CHECK(!session.damage());
  }
}
void replay(Backend backend) {
  for (const Step& step : on_one_gpu()) {
    // Some heads span several runs of the emulator's three blocks. Each set of lengths comes twice.
    Problem p = problem(1, 900, 128, DType::bf16);
    p.batch = 3, p.heads = 4, p.kv_heads = 1;
    p.seqused_k = {900, 900, 900};
    replay(step, split(p, step), backend);
    // Even splits, of which later lengths use some, one or none.
    if (std::ranges::find(step.takes, "split_keys") == step.takes.end()) continue;
    p.own["split_keys"] = {128};
    replay(step, p, backend);
  }
}
}  // namespace

TEST_CASE("a replayed launch matches the reference with other lengths", "[emulated]") {
  replay(Backend::emulated);
}
TEST_CASE("a replayed CUDA graph matches the reference with other lengths", "[gpu]") {
  replay(Backend::gpu);
}

namespace {
// Batch invariance: a sequence alone and in a batch, with splits of 128 keys.
void same_bits_in_any_batch(Backend backend) {
  int steps = 0;
  for (const Step& step : on_one_gpu()) {
    if (std::ranges::find(step.takes, "split_keys") == step.takes.end()) continue;
    ++steps;
    for (const int64_t d : {64, 128, 256}) {
      Problem all = problem(2, 900, d, DType::bf16);
      all.batch = 3, all.heads = 4, all.kv_heads = 2, all.causal = true;
      all.seqused_k = {900, 250, 517};
      all.own["split_keys"] = {128};
      all.finish();
      const HostTensors drawn = draw(*step.operation, all).tensors;
      Session together(all, *step.operation, backend, drawn);
      REQUIRE(together.prepare(step).ok());
      REQUIRE(together.launch().ok());
      const HostTensors expected = together.outputs();
      for (int64_t b = 0; b < all.batch; ++b) {
        Problem one = all;
        one.batch = 1, one.seqused_k = {all.seqused_k[static_cast<std::size_t>(b)]};
        one.finish();
        const auto share = [&](HostTensor& mine, const HostTensor& of_all) {
          const auto n = static_cast<std::ptrdiff_t>(mine.data.size());
          mine.data.assign(of_all.data.begin() + b * n, of_all.data.begin() + (b + 1) * n);
        };
        HostTensors inputs = draw(*step.operation, one).tensors;
        for (const char* name : {"q", "k", "v"}) share(inputs.at(name), drawn.at(name));
        Session alone(one, *step.operation, backend, inputs);
        REQUIRE(alone.prepare(step).ok());
        REQUIRE(alone.launch().ok());
        for (auto& [name, t] : alone.outputs()) {
          HostTensor part = t;
          share(part, expected.at(name));
          INFO(step.name << " " << name << " of sequence " << b << ", d=" << d);
          CHECK(same(t, part));
        }
      }
    }
  }
  CHECK(steps == 4);
}
}  // namespace

TEST_CASE("a fixed split size gives batch-invariant results", "[emulated]") {
  same_bits_in_any_batch(Backend::emulated);
}
TEST_CASE("a fixed split size gives batch-invariant results on the GPU", "[gpu]") {
  same_bits_in_any_batch(Backend::gpu);
}

namespace {
// One key in each of the first tiles has a score of `high` (log2 units), all others one of `high` -
// 10.5. The many low scores have about as much weight as the few high ones, so precision that P
// loses shows in O. V is -1 for the few, else 1.
void few_above_many(Backend backend) {
  const std::size_t many = backend == Backend::gpu ? 8192 : 2048;
  for (const DType dtype : {DType::fp16, DType::bf16})
    for (const float high : {-200.0f, -70.0f, -7.99f, -0.5f, 0.25f, 14.5f, 70.0f, 200.0f})
      for (const std::size_t keys : {std::size_t{3}, many}) {  // 3: keys of one warp only
        Problem p = problem(1, static_cast<int64_t>(keys), 64, dtype);
        p.heads = 3, p.kv_heads = 1;
        p.softmax_scale = std::log(2.0);
        p.finish();
        Case c(p, decode());
        auto& q = c.inputs.at("q").data;
        for (std::size_t i = 0; i < q.size(); ++i) q[i] = i % 64 == 0;
        for (std::size_t j = 0; j < keys; ++j) {
          const bool few = j < 128 && j % 16 == 5;
          for (std::size_t n = 0; n < 64; ++n) {
            c.inputs.at("k").data[64 * j + n] = n > 0 ? 0 : few ? high : high - 10.5f;
            c.inputs.at("v").data[64 * j + n] = few ? -1.0f : 1.0f;
          }
        }
        for (const char* name : {"q", "k", "v"}) {
          HostTensor& t = c.inputs.at(name);
          round_to(t.spec.dtype, t.data.data(), t.data.size());
        }
        c.expected = c.operation.reference(p, c.inputs, {});
        for (const Step& step : on_one_gpu()) {
          if (refusal(step, p)) continue;
          INFO(step.name << ": " << keys << " keys with maxima of " << high);
          CHECK(run_step(step, c, backend) == "");
        }
      }
}
}  // namespace

TEST_CASE("scores far below the maximum keep their weight", "[emulated]") {
  few_above_many(Backend::emulated);
}
TEST_CASE("scores far below the maximum keep their weight on the GPU", "[gpu]") {
  few_above_many(Backend::gpu);
}

// Percentage of rows that v14 computes twice: their maximum is outside bf16's range.
TEST_CASE("only peaked inputs leave the range of the unified max") {
  const auto percent_outside = [](InputKind inputs) {
    Problem p = problem(16, 1024, 128, DType::bf16, inputs);
    p.heads = 32, p.kv_heads = 8;
    p.finish();
    const HostTensors in = draw(decode(), p).tensors;
    const int64_t rows = p.heads * p.seqlen_q, per_kv_head = rows / p.kv_heads, d = p.head_dim;
    int outside = 0;
    for (int64_t row = 0; row < rows; ++row) {
      double max = -INFINITY;
      for (int64_t j = 0; j < p.seqlen_k; ++j) {
        const auto q = in.at("q").data.begin() + row * d;
        const auto k = in.at("k").data.begin() + (row / per_kv_head * p.seqlen_k + j) * d;
        max = std::max(max, std::inner_product(q, q + d, k, 0.0) * p.softmax_scale / std::log(2));
      }
      outside += max < -64 || max > 64;
    }
    return 100.0 * outside / static_cast<double>(rows);
  };
  CHECK(percent_outside(InputKind::random) == 0);
  CHECK(percent_outside(InputKind::outlier) == 0);
  CHECK(percent_outside(InputKind::needle) == 0);
  CHECK(percent_outside(InputKind::peaked) == Approx(57).margin(1));
}

TEST_CASE("fixed split sizes match the reference", "[emulated]") {
  for (const int64_t keys : {128, 384, 1 << 20}) {
    Problem p = problem(3, 1000, keys == 384 ? 256 : 128, DType::bf16);
    p.batch = 3, p.heads = 8, p.kv_heads = 2, p.causal = true;
    p.seqused_k = {1000, 0, 129};
    p.own["split_keys"] = {static_cast<double>(keys)};
    check_steps("decode", p, Backend::emulated);
  }
}

TEST_CASE("steps refuse unsupported problems with the reason", "[emulated]") {
  const auto refused = [](Problem p, const char* why) {
    p.finish();
    for (const Step& step : on_one_gpu()) {
      if (promised(step, p)) continue;
      const auto reason = refusal(step, p);
      REQUIRE(reason);
      INFO(step.name << ": " << *reason);
      CHECK(reason->find(why) != std::string::npos);
    }
  };
  refused(problem(1, 64, 96, DType::bf16), "--head-dim 96: this step takes 64, 128 and 256");
  refused(problem(17, 64, 64, DType::bf16), "--seqlen-q 17: this step takes at most 16");
  refused(problem(1, 64, 64, DType::fp32), "--dtype fp32: this step takes fp16 and bf16");
  Problem p = problem(1, 64, 64, DType::bf16);
  p.softcap = 30;
  refused(p, "--softcap 30: this step has no softcap");
  p = problem(1, 1024, 64, DType::bf16);
  p.own["split_keys"] = {192};
  refused(p, "--split-keys 192: ");  // not a multiple of 128, or not supported
}

TEST_CASE("stream-K steps refuse 2^30 or more tiles", "[emulated]") {
  Problem p = problem(1, (1 << 30) - 1, 64, DType::bf16);
  p.batch = 63, p.heads = p.kv_heads = 1;
  p.finish();
  for (const Step& step : on_one_gpu()) {
    const bool runs = one_of_steps(
        step, {"v8_stream_k", "v9_eight_warps", "v10_vectorised_combine", "v11_shared_p",
               "v12_more_rows", "v13_even_splits", "v14_unified_max", "v15_wgmma", "v16_features"});
    INFO(step.name);
    CHECK(!refusal(step, p));
    p.batch = 64;
    CHECK(refusal(step, p).has_value() == runs);
    p.batch = 63;
  }
}

TEST_CASE("all steps match the reference on the GPU", "[gpu]") {
  std::vector<int64_t> lengths = kLengths05;
  lengths.insert(lengths.end(), {4096, 32789});
  Counts ran;
  decode_problems(lengths,
                  [&](const Problem& p) { ran += check_steps("decode", p, Backend::gpu); });
  for (const Step& step : on_one_gpu()) CHECK(ran.of[step.name] == 45);
  for (const int64_t used : {131072, 1}) {
    Problem p = problem(1, 131072, 128, DType::bf16, InputKind::needle);
    p.batch = 2, p.heads = 8, p.kv_heads = 2;
    p.seqused_k = {used, 77777};
    check_steps("decode", p, Backend::gpu);
  }
  // Heads with many splits and several row tiles; then more sequences than lanes in a warp.
  Problem p = problem(8, 60001, 128, DType::bf16);
  p.heads = 12, p.kv_heads = 1, p.causal = true;
  check_steps("decode", p, Backend::gpu);
  p = problem(1, 3000, 64, DType::fp16);
  p.batch = 70, p.heads = 4, p.kv_heads = 2;
  for (int64_t b = 0; b < p.batch; ++b) p.seqused_k.push_back(b % 7 == 0 ? 0 : b * 1009 % 3001);
  check_steps("decode", p, Backend::gpu);
}

TEST_CASE("1000 GPU runs give bitwise equal results", "[gpu]") {
  for (const Step& step : on_one_gpu()) {
    if (!step.deterministic) continue;
    Problem p = problem(1, 5000, 128, DType::bf16);
    p.batch = 3, p.heads = 8, p.kv_heads = 2;
    p.seqused_k = {5000, 1, 3333};
    p.finish();
    check_gpu_repeats(step, p);
  }
}

TEST_CASE("K and V of more than 2^31 elements", "[gpu][large]") {
  Problem p = problem(1, 131072, 128, DType::bf16);
  p.batch = 129, p.heads = 4, p.kv_heads = 1;
  check_large_steps("decode", p, Backend::gpu);
}
