// The (m, l) states form a commutative monoid, and every step of chapter 02 is correct on every
// shape it accepts.
#include <numeric>
#include <random>

#include "02_online_softmax/host/algorithm.h"
#include "02_online_softmax/host/operations.h"
#include "device/roofline.h"
#include "run/runner.h"
#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

const std::vector<DType> kDTypes{DType::bf16, DType::fp16, DType::fp32};

Problem rows_cols(int64_t rows, int64_t cols, DType dtype, InputKind inputs = InputKind::random) {
  Problem p = problem(rows, cols, 1, dtype, inputs);
  p.heads = p.kv_heads = 1;
  p.matrix = true;
  return p;
}

// Column counts at and next to the sizes of a vector, a warp, a group and a block. With several
// rows, rows also start inside a vector.
const std::vector<int64_t> kColumns{1,    2,    3,    4,    5,    7,    8,    9,   15,
                                    16,   31,   32,   33,   63,   64,   65,   127, 128,
                                    129,  203,  255,  256,  257,  511,  513,  799, 1000,
                                    1023, 1024, 1025, 2047, 2048, 2049, 4097, 5003};

// Softmax problems: all widths, dtypes and input kinds. Masks set -inf at the ends of rows, and
// make some rows all -inf.
template <class Body>
void softmax_problems(const std::vector<int64_t>& columns, Body body) {
  constexpr InputKind kInputs[] = {InputKind::needle, InputKind::random, InputKind::peaked,
                                   InputKind::outlier};
  std::size_t n = 0;
  for (const int64_t cols : columns)
    for (const DType dtype : kDTypes)
      for (int mask = 0; mask < 3; ++mask, ++n) {
        Problem p = rows_cols(mask == 1 ? cols % 7 + 5 : 5, cols, dtype, kInputs[n % 4]);
        p.causal = mask == 1;  // the first rows may be all -inf
        if (mask == 2) p.window_left = 0, p.window_right = 16;  // the last rows, too
        p.seed = n + 1;
        body(p);
      }
}

Problem with_top_k(Problem p, int64_t k) {
  p.top_k = k;
  return p;
}

// Runs a step on one row of scores and returns y.
std::vector<float> softmax_of(const Step& step, const std::vector<float>& x) {
  Problem p = rows_cols(1, static_cast<int64_t>(x.size()), DType::fp32);
  p.finish();
  const Operation& op = softmax();
  Session session(p, op, Backend::emulated, {{"x", HostTensor{op.inputs(p)[0], x}}});
  CHECK(session.prepare(step).ok());
  CHECK(session.launch().ok());
  return session.outputs().at("y").data;
}

online::Row random_row(Eigen::Index size, double spread, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, spread);
  online::Row x(size);
  for (double& v : x) v = normal(random);
  return x;
}

bool close(online::SoftmaxState a, online::SoftmaxState b) {
  return a.max == b.max && std::abs(a.sum - b.sum) <= 1e-12 * std::max(a.sum, b.sum);
}

}  // namespace

// All steps accept all dtypes and any number of rows and columns, up to the README's three limits.
bool attn::tests::promised(const Step& step, const Problem& p) {
  if (step.operation == &forward()) return plain(p) && p.head_dim <= 256;
  if (step.operation == &softmax_topk()) return p.top_k <= 32;
  // a partial last vector does not count
  const int64_t columns_of_16_bytes = 16 / size_of(p.dtype);
  return step.name != "v4_one_read" || p.seqlen_k / columns_of_16_bytes <= 352 * 1024 / 16;
}

TEST_CASE("softmax states form a commutative monoid under merge", "[algebra]") {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const double spread = seed % 2 == 0 ? 1 : 1e4;
    const online::Row x = random_row(48, spread, seed);
    const auto a = online::max_sum(x.head(5), 2), b = online::max_sum(x.segment(5, 30), 7),
               c = online::max_sum(x.tail(13), 1);
    CHECK(close(online::merge(a, b), online::merge(b, a)));
    CHECK(close(online::merge(online::merge(a, b), c), online::merge(a, online::merge(b, c))));
    CHECK(close(online::merge(a, {}), a));
    CHECK(close(online::merge({}, a), a));
    CHECK(close(online::merge(online::merge(a, b), c), online::max_sum(x, 48)));
  }
  const online::SoftmaxState nothing = online::merge({}, {});
  CHECK((std::isinf(nothing.max) && nothing.sum == 0));
}

TEST_CASE("any split and any order of a row give the same softmax", "[algebra]") {
  online::Row x = random_row(97, 30, 1);
  x[3] = -std::numeric_limits<double>::infinity();
  const online::Row whole = online::softmax(x, 97);
  CHECK(std::abs(whole.sum() - 1) < 1e-14);
  for (const Eigen::Index block : {1, 2, 3, 16, 50, 96, 1000})
    CHECK((online::softmax(x, block) - whole).cwiseAbs().maxCoeff() < 1e-14);
  std::vector<Eigen::Index> order(97);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(2));
  const online::Row shuffled = online::softmax(x(order), 10);
  for (Eigen::Index i = 0; i < 97; ++i)
    CHECK(std::abs(shuffled[i] - whole[order[static_cast<std::size_t>(i)]]) < 1e-14);
  CHECK(online::softmax(online::Row::Constant(5, -std::numeric_limits<double>::infinity()), 2)
            .sum() == 0);
}

TEST_CASE("blockwise attention of a row matches attention", "[algebra]") {
  const online::Row q = random_row(8, 1, 3);
  online::Matrix k(53, 8), v(53, 6);
  for (Eigen::Index j = 0; j < 53; ++j) k.row(j) = random_row(8, 3, 100 + unsigned(j));
  for (Eigen::Index j = 0; j < 53; ++j) v.row(j) = random_row(6, 1, 200 + unsigned(j));
  const online::Row o = online::softmax(0.7 * q * k.transpose(), 53) * v;
  for (const Eigen::Index block : {1, 4, 16, 53, 64})
    CHECK((online::attention(q, k, v, 0.7, block) - o).cwiseAbs().maxCoeff() < 1e-13);
}

namespace {
// The text of Counts when each of the five softmax steps has run `n` problems.
std::string all_ran(int n) {
  return fmt::format(
      "v1_three_pass {0}, v2_online {0}, v3_warp {0}, v4_one_read {0}, v5_split_row {0}", n);
}
}  // namespace

TEST_CASE("softmax steps match the reference on all widths", "[emulated]") {
  Counts ran;
  softmax_problems(kColumns,
                   [&](const Problem& p) { ran += check_steps("softmax", p, Backend::emulated); });
  CHECK(ran.text() == all_ran(315));
}

TEST_CASE("softmax steps match the reference on long rows", "[emulated]") {
  // More than the registers of v4's largest group hold, more than one chunk of v5, and not a
  // multiple of a vector.
  for (const int64_t cols : {33001, 65536, 70001})
    for (const DType dtype : kDTypes)
      check_steps("softmax", rows_cols(3, cols, dtype, InputKind::needle), Backend::emulated);
  check_steps("softmax", rows_cols(2, 180224, DType::bf16), Backend::emulated);
  check_steps("softmax", rows_cols(1, 1'000'003, DType::fp16, InputKind::peaked),
              Backend::emulated);
}

TEST_CASE("top-k matches the reference on ties and short rows", "[emulated]") {
  Counts ran;
  const std::vector<int64_t> ks{1, 8, 5, 32, 31};
  std::size_t n = 0;
  softmax_problems(kColumns, [&](const Problem& p) {
    ran += check_steps("softmax_topk", with_top_k(p, ks[n++ % ks.size()]), Backend::emulated);
  });
  CHECK(ran.text() == "v6_softmax_topk 315");
  // Ties: the smaller columns first. Ascending values: every element enters the list.
  const Step& step = step_named("v6_softmax_topk");
  for (const bool rising : {false, true}) {
    Problem p = with_top_k(rows_cols(1, 3000, DType::fp32), 7);
    p.finish();
    const Operation& op = softmax_topk();
    std::vector<float> x(3000, 2.5f);
    if (rising) std::iota(x.begin(), x.end(), -2990.0f);
    const HostTensors out = outputs_of(step, p, {{"x", HostTensor{op.inputs(p)[0], x}}});
    for (std::size_t i = 0; i < 7; ++i)
      CHECK(out.at("indices").numbers[i] == (rising ? 2999 - int64_t(i) : int64_t(i)));
    CHECK(out.at("values").data[0] == Approx(rising ? 1 - std::exp(-1.0) : 1 / 3000.0));
  }
}

TEST_CASE("attention of a row matches the reference on short problems", "[emulated]") {
  Counts ran;
  covering_problems({1, 2, 3, 15, 17, 33, 64, 65, 113, 129}, {64, 128, 40, 1, 33, 192, 256},
                    kDTypes,
                    [&](Problem p) { ran += check_steps("forward", p, Backend::emulated); });
  CHECK(ran.text() == "v7_attention_row 50");
}

TEST_CASE("softmax is shift-invariant and does not overflow", "[emulated]") {
  std::vector<float> x(1537);
  // exact in fp32
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7919 % 1537) / 256;
  std::vector<float> shifted = x, huge = x;
  for (float& v : shifted) v -= 1024;  // still exact in fp32
  // exp overflows fp32, and so do some differences
  for (float& v : huge) v *= 5e37f;
  huge[99] = 3e38f;
  for (const Step& step : chapter().steps) {
    if (step.operation != &softmax()) continue;
    INFO(step.name);
    CHECK(softmax_of(step, x) == softmax_of(step, shifted));
    const std::vector<float> y = softmax_of(step, huge);
    CHECK(std::accumulate(y.begin(), y.end(), 0.0) == Approx(1));
    CHECK(std::all_of(y.begin(), y.end(), [](float v) { return v >= 0 && v <= 1; }));
  }
}

TEST_CASE("every schedule gives the same bits", "[emulated]") {
  for (const Step& step : chapter().steps) {
    Problem p = step.operation == &forward() ? problem(9, 70, 40, DType::bf16)
                                            : rows_cols(3, 1003, DType::bf16, InputKind::needle);
    if (step.operation == &softmax_topk()) p.top_k = 8;
    p.finish();
    check_schedules(step, p);
  }
}

TEST_CASE("steps refuse unsupported problems and say why", "[emulated]") {
  Problem p = rows_cols(4, 100'000, DType::fp32);
  p.finish();
  CHECK(refusal(step_named("v4_one_read"), p).value().find("352 KiB") != std::string::npos);
  CHECK_FALSE(refusal(step_named("v5_split_row"), p));
  p = with_top_k(rows_cols(4, 100, DType::fp32), 33);
  p.finish();
  CHECK(refusal(step_named("v6_softmax_topk"), p).value().find("at most 32") != std::string::npos);
  p = problem(8, 8, 257, DType::bf16);
  p.finish();
  CHECK(refusal(step_named("v7_attention_row"), p).value().find("at most 256") !=
        std::string::npos);
  p = problem(8, 8, 64, DType::bf16);
  p.dropout = 0.5;
  p.finish();
  CHECK(refusal(step_named("v7_attention_row"), p).value().find("no dropout") != std::string::npos);
  // The longest row that v4 accepts is correct; the table and the step agree on the limit.
  p = rows_cols(1, 352 * 1024 / 4, DType::fp32);
  CHECK(check_steps("softmax", p, Backend::emulated).text() == all_ran(1));
  p = rows_cols(1, 352 * 1024 / 4 + 3, DType::fp32);
  CHECK(check_steps("softmax", p, Backend::emulated).text() == all_ran(1));
}

TEST_CASE("zero rows or zero columns give an empty result", "[emulated]") {
  for (const char* operation : {"softmax", "softmax_topk", "forward"})
    for (const char* none : {"--rows", "--cols"}) {
      const bool has_rows = std::string(operation) != "forward";
      const char* argv[] = {"02_online_softmax", "--device", "emulated", "--operation", operation,
                            none, "0"};
      CHECK(run_chapter(chapter(), 7, argv) == (has_rows ? 0 : 2));
    }
}

TEST_CASE("cost models match the README", "[emulated]") {
  Problem p = rows_cols(4096, 65536, DType::bf16);
  p.finish();
  const double bytes = 4096.0 * 65536 * 2;
  const auto total = [&](const char* name) {
    double sum = 0;
    for (const Phase& phase : step_named(name).cost(p)) sum += phase.hbm_read + phase.hbm_write;
    return sum;
  };
  CHECK(total("v1_three_pass") == 4 * bytes);
  CHECK(total("v2_online") == 3 * bytes);
  CHECK(total("v3_warp") == 3 * bytes);
  CHECK(total("v4_one_read") == 2 * bytes);
  CHECK(total("v5_split_row") == 3 * bytes);
  CHECK(total("v4_one_read") == softmax().compulsory_bytes(p));
}

TEST_CASE("all steps match the reference on the GPU", "[gpu]") {
  std::size_t n = 0;
  Counts softmax, top_k, forward;
  softmax_problems(kColumns, [&](const Problem& p) {
    softmax += check_steps("softmax", p, Backend::gpu);
    top_k += check_steps("softmax_topk", with_top_k(p, 1 + static_cast<int64_t>(n++ % 32)),
                         Backend::gpu);
  });
  CHECK(softmax.text() == all_ran(315));
  CHECK(top_k.text() == "v6_softmax_topk 315");
  for (const int64_t cols : {8191, 16384, 32768, 33001, 65535, 65536, 70001, 88064, 1'000'003}) {
    for (const DType dtype : kDTypes)
      check_steps("softmax", rows_cols(7, cols, dtype, InputKind::needle), Backend::gpu);
    check_steps("softmax_topk", with_top_k(rows_cols(7, cols, DType::bf16), 32), Backend::gpu);
  }
  covering_problems(kLengths, {64, 128, 40, 1, 33, 192, 256}, kDTypes,
                    [&](Problem p) { forward += check_steps("forward", p, Backend::gpu); });
  CHECK(forward.text() == "v7_attention_row 110");
}

TEST_CASE("the two back ends agree", "[gpu]") {
  for (const Step& step : chapter().steps) {
    Problem p = step.operation == &forward() ? problem(203, 239, 64, DType::bf16, InputKind::needle)
                                            : rows_cols(33, 1003, DType::bf16, InputKind::needle);
    if (step.operation == &softmax_topk()) p.top_k = 8;
    p.finish();
    check_back_ends_agree(step, p);
  }
}

TEST_CASE("1000 repeats give the same bits", "[gpu]") {
  for (const Step& step : chapter().steps) {
    Problem p = step.operation == &forward() ? problem(70, 203, 64, DType::bf16)
                                            : rows_cols(33, 5003, DType::bf16);
    if (step.operation == &softmax_topk()) p.top_k = 8;
    p.finish();
    check_gpu_repeats(step, p);
  }
}

TEST_CASE("16 Mi columns and more than 2^31 elements match the reference", "[gpu][large]") {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{2, 16 << 20}, {33'000, 65'537}}) {
    Problem p = rows_cols(rows, cols, DType::bf16, InputKind::needle);
    p.finish();
    const Operation& op = softmax();
    const HostTensors inputs = draw_inputs(p, op.inputs(p));
    Session session(p, op, Backend::gpu, inputs);
    const auto expected = op.reference(p, inputs, {.full = false, .budget = 1e7});
    for (const Step* step : steps_for("softmax", p)) {
      INFO(step->name << " " << p.text());
      REQUIRE(session.prepare(*step).ok());
      REQUIRE(session.launch().ok());
      CHECK_FALSE(session.damage());
      const HostTensors out = session.outputs();
      for (const Expected& e : expected) CHECK(check(out.at(e.spec.name), e).failure == "");
    }
  }
}
