// The meaning of a problem, drawing and rounding of its tensors, and predictions.
#include "attn/problem.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "attn/error.h"
#include "attn/feature.h"
#include "check/inputs.h"
#include "device/roofline.h"
#include "tests/catch.h"

namespace {

using namespace attn;

template <class Change>
Problem problem_with(Change change) {
  Problem p;
  change(p);
  p.finish();
  return p;
}

// ---- Problem ----------------------------------------------------------------------------------

template <class Change>
void refuses(const std::string& what, Change change) {
  std::string message;
  try {
    problem_with(change);
  } catch (const InputError& error) {
    message = error.what();
  }
  INFO(what << ": '" << message << "'");
  CHECK(message.find(what) != std::string::npos);
  CHECK(message.find('\n') == std::string::npos);
}

TEST_CASE("a problem without a meaning is refused in one line", "[problem]") {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t n : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    refuses("--heads", [=](Problem& p) { p.heads = n; });
    refuses("--kv-heads", [=](Problem& p) { p.kv_heads = n; });
    refuses("--head-dim", [=](Problem& p) { p.head_dim = n; });
    if (n == 0) continue;  // an empty problem is valid
    refuses("--batch", [=](Problem& p) { p.batch = n; });
    refuses("--seqlen-q", [=](Problem& p) { p.seqlen_q = n; });
    refuses("--seqlen-k", [=](Problem& p) { p.seqlen_k = n; });
  }
  refuses("--heads 6 --kv-heads 4", [](Problem& p) { p.heads = 6, p.kv_heads = 4; });
  refuses("--heads 2 --kv-heads 4", [](Problem& p) { p.heads = 2, p.kv_heads = 4; });
  refuses("below 2^30", [](Problem& p) { p.seqlen_q = int64_t{1} << 30; });
  refuses("below 2^30", [](Problem& p) { p.seqlen_k = kMost; });
  refuses("--window -2,0", [](Problem& p) { p.window_left = -2, p.window_right = 0; });
  refuses("--window 3,-7", [](Problem& p) { p.window_left = 3, p.window_right = -7; });
  for (const double scale : {NAN, INFINITY, -INFINITY})
    refuses("--scale", [=](Problem& p) { p.softmax_scale = scale; });
  for (const double cap : {-1.0, 1e-4, 1e7, double{NAN}, double{INFINITY}})
    refuses("--softcap", [=](Problem& p) { p.softcap = cap; });
  refuses("63 bits", [](Problem& p) { p.batch = int64_t{1} << 60; });
  refuses("below 2^30", [](Problem& p) { p.head_dim = kMost; });
  refuses("63 bits", [](Problem& p) { p.heads = p.kv_heads = kMost; });
  refuses("63 bits", [](Problem& p) {  // only S is too large
    p.seqlen_q = p.seqlen_k = (int64_t{1} << 30) - 1;
    p.head_dim = 1, p.batch = 1 << 10;
  });
}

TEST_CASE("finish sets the scale where none was given", "[problem]") {
  CHECK(problem_with([](Problem& p) { p.head_dim = 64; }).softmax_scale == 0.125);
  CHECK(problem_with([](Problem& p) { p.softmax_scale = 2.5; }).softmax_scale == 2.5);
  CHECK(problem_with([](Problem& p) { p.softmax_scale = -1; }).softmax_scale == -1);
  CHECK(problem_with([](Problem& p) { p.heads = 12, p.kv_heads = 3; }).group() == 4);
  problem_with([](Problem& p) { p.seqlen_k = (int64_t{1} << 30) - 1; });
}

// A pair of lengths, the masks, and the visible keys of some queries.
TEST_CASE("visible keys end at the last key for the last query", "[problem]") {
  const auto range = [](int64_t m, int64_t n, bool causal, int64_t left, int64_t right, int64_t i) {
    const KeyRange keys = problem_with([&](Problem& p) {
                            p.seqlen_q = m, p.seqlen_k = n, p.causal = causal;
                            p.window_left = left, p.window_right = right;
                          }).visible(i);
    CHECK(keys.begin <= keys.end);
    CHECK(keys.begin >= 0);
    if (keys.size() > 0) CHECK(keys.end <= n);
    return std::array<int64_t, 3>{keys.begin, keys.end, keys.size()};
  };
  using Range = std::array<int64_t, 3>;
  CHECK(range(8, 8, false, -1, -1, 3) == Range{0, 8, 8});
  CHECK(range(8, 8, true, -1, -1, 0) == Range{0, 1, 1});
  CHECK(range(8, 8, true, -1, -1, 7) == Range{0, 8, 8});
  CHECK(range(4, 8, true, -1, -1, 0) == Range{0, 5, 5});  // bottom-right aligned
  CHECK(range(8, 4, true, -1, -1, 3)[2] == 0);
  CHECK(range(8, 4, true, -1, -1, 4) == Range{0, 1, 1});
  CHECK(range(8, 8, false, 0, 0, 5) == Range{5, 6, 1});
  CHECK(range(8, 8, false, 2, 1, 5) == Range{3, 7, 4});
  CHECK(range(8, 8, false, 2, -1, 5) == Range{3, 8, 5});
  CHECK(range(8, 8, false, -1, 1, 5) == Range{0, 7, 7});
  CHECK(range(8, 8, true, 2, 100, 5) == Range{3, 6, 3});  // causal is the narrower mask
  CHECK(range(8, 4, false, 1, 1, 7) == Range{2, 4, 2});
  CHECK(range(8, 4, false, 1, 1, 0)[2] == 0);
  CHECK(range(4, 8, false, 1, 0, 0) == Range{3, 5, 2});
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  CHECK(range(8, 8, false, kMost, kMost, 5) == Range{0, 8, 8});
  CHECK(range(8, 8, false, kMost, 0, 5) == Range{0, 6, 6});
}

TEST_CASE("visible_pairs counts what visible shows", "[problem]") {
  const auto pairs = [](int64_t m, int64_t n, bool causal, int64_t left, int64_t right) {
    const Problem p = problem_with([&](Problem& x) {
      x.seqlen_q = m, x.seqlen_k = n, x.causal = causal;
      x.window_left = left, x.window_right = right;
    });
    CHECK(p.masked() == (causal || left >= 0 || right >= 0));
    return p.visible_pairs();
  };
  CHECK(pairs(100, 30, false, -1, -1) == 3000);
  CHECK(pairs(100, 100, true, -1, -1) == 5050);
  CHECK(pairs(3, 5, true, -1, -1) == 3 + 4 + 5);
  CHECK(pairs(5, 3, true, -1, -1) == 1 + 2 + 3);
  CHECK(pairs(10, 10, false, 1, 1) == 28);
  CHECK(pairs(10, 10, false, 0, 0) == 10);
  CHECK(pairs(1 << 20, 1 << 20, false, -1, -1) == 0x1p40);
}

TEST_CASE("shape_of has the numbers of a problem in 32 bits", "[problem]") {
  const auto shape = [](auto change) { return shape_of(problem_with(change)); };
  const Shape s = shape([](Problem& p) {
    p.heads = 6, p.kv_heads = 3, p.seqlen_q = 70, p.seqlen_k = 90, p.head_dim = 16;
    p.window_left = 5, p.window_right = 7, p.softcap = 50;
  });
  CHECK((s.heads == 6 && s.kv_heads == 3));
  CHECK((s.seqlen_q == 70 && s.seqlen_k == 90 && s.head_dim == 16));
  CHECK((s.window_left == 5 && s.window_right == 7));
  CHECK(s.softmax_scale == 0.25f);
  CHECK(s.softcap == 50);
  const Shape none = shape([](Problem&) {});
  CHECK(none.softcap == 0);
  CHECK((none.window_left == Shape::kNoWindow && none.window_right == Shape::kNoWindow));
  const Shape wide = shape([](Problem& p) { p.window_left = p.window_right = int64_t{1} << 40; });
  CHECK((wide.window_left == Shape::kNoWindow && wide.window_right == Shape::kNoWindow));
  const Shape causal =
      shape([](Problem& p) { p.causal = true, p.window_right = 9, p.window_left = 4; });
  CHECK((causal.window_left == 4 && causal.window_right == 0));
}

TEST_CASE("a problem's text has all of it", "[problem]") {
  const Problem p = problem_with([](Problem& x) {
    x.causal = true, x.window_left = 8, x.dtype = DType::fp16;
    x.softcap = 12.5, x.alibi = true, x.dropout = 0.25;
    x.inputs = InputKind::needle, x.seed = 5;
  });
  CHECK(p.text() == "B=1 Hq=2 Hkv=2 seqlen_q=128 seqlen_k=128 d=64 fp16 causal window=8,-1 "
                    "softcap=12.5 alibi dropout=0.25 inputs=needle seed=5");
}

// ---- inputs -----------------------------------------------------------------------------------

HostTensors draw(const Problem& p) {
  const auto spec = [&](const char* name, int64_t heads, int64_t rows) {
    return TensorSpec{name, {p.batch, heads, rows, p.head_dim}, p.dtype};
  };
  return draw_inputs(p, std::vector<TensorSpec>{
                            spec("q", p.heads, p.seqlen_q), spec("k", p.kv_heads, p.seqlen_k),
                            spec("v", p.kv_heads, p.seqlen_k), spec("do", p.heads, p.seqlen_q)});
}

struct Moments {
  double mean = 0, variance = 0, kurtosis = 0, neighbours = 0;  // neighbours: their correlation
};
Moments moments(const std::vector<float>& x) {
  Moments m;
  const auto n = static_cast<double>(x.size());
  for (const float v : x) m.mean += v / n;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double d = x[i] - m.mean;
    m.variance += d * d / n;
    m.kurtosis += d * d * d * d / n;
    if (i > 0) m.neighbours += d * (x[i - 1] - m.mean) / n;
  }
  m.kurtosis /= m.variance * m.variance;
  return m;
}

constexpr InputKind kKinds[] = {InputKind::random, InputKind::needle, InputKind::peaked,
                                InputKind::outlier};

TEST_CASE("ALiBi slopes are the published ones", "[inputs]") {
  const auto exponents = [](int64_t heads) {
    std::vector<double> all;
    for (int64_t h = 0; h < heads; ++h)
      all.push_back(std::round(-1e9 * std::log2(alibi_slope(h, heads))) / 1e9);
    return all;
  };
  CHECK(exponents(1) == std::vector<double>{8});
  CHECK(exponents(2) == std::vector<double>{4, 8});
  CHECK(exponents(3) == std::vector<double>{4, 8, 2});
  CHECK(exponents(8) == std::vector<double>{1, 2, 3, 4, 5, 6, 7, 8});
  CHECK(exponents(12) == std::vector<double>{1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5});
  CHECK(exponents(16) ==
        std::vector<double>{0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5, 8});
  const Problem p = problem_with([](Problem& x) { x.heads = x.kv_heads = 3, x.alibi = true; });
  const TensorSpec spec = alibi_slopes(p);
  CHECK(draw_inputs(p, std::span(&spec, 1)).at("alibi").data ==
        std::vector<float>{0x1p-4f, 0x1p-8f, 0x1p-2f});
}

TEST_CASE("random inputs are standard normal and independent", "[inputs]") {
  const Problem p = problem_with([](Problem& x) {
    x.heads = x.kv_heads = 8, x.seqlen_q = x.seqlen_k = 512, x.dtype = DType::fp32;
  });
  const HostTensors in = draw(p);  // 262144 numbers per tensor: deviations below 1/512
  for (const char* tensor : {"q", "k", "v", "do"}) {
    INFO(tensor);
    const Moments m = moments(in.at(tensor).data);
    CHECK(std::abs(m.mean) < 0.01);
    CHECK(m.variance == Approx(1).margin(0.015));
    CHECK(m.kurtosis == Approx(3).margin(0.06));
    CHECK(std::abs(m.neighbours) < 0.01);
  }
  double qk = 0;
  for (std::size_t i = 0; i < in.at("q").data.size(); ++i)
    qk += double{in.at("q").data[i]} * in.at("k").data[i];
  CHECK(std::abs(qk) / static_cast<double>(in.at("q").data.size()) < 0.01);
}

TEST_CASE("outlier inputs have one large number in a thousand", "[inputs]") {
  const Problem p = problem_with([](Problem& x) {
    x.heads = x.kv_heads = 8, x.seqlen_q = x.seqlen_k = 1024, x.dtype = DType::fp32;
    x.inputs = InputKind::outlier;
  });
  Problem plain = p;
  plain.inputs = InputKind::random;
  const HostTensors in = draw(p), without = draw(plain);
  for (const char* tensor : {"q", "k", "v"}) {
    INFO(tensor);
    const std::vector<float>&x = in.at(tensor).data, &y = without.at(tensor).data;
    std::vector<float> added;
    for (std::size_t i = 0; i < x.size(); ++i)
      if (x[i] != y[i]) added.push_back(x[i] - y[i]);
    const double rate = static_cast<double>(added.size()) / static_cast<double>(x.size());
    CHECK(rate == Approx(0.001).epsilon(0.2));  // 524 of 524288, +-23
    CHECK(moments(added).variance == Approx(100).epsilon(0.3));
    CHECK(std::abs(moments(added).mean) < 2);
    CHECK(moments(x).variance == Approx(1.1).epsilon(0.05));
  }
}

// The softmax of row i of a head over its visible keys.
std::vector<double> probabilities(const Problem& p, const HostTensors& in, int64_t b, int64_t h,
                                  int64_t i, double* max_score = nullptr) {
  const KeyRange keys = p.visible(i);
  std::vector<double> s;
  double max = -INFINITY, sum = 0;
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    double dot = 0;
    for (int64_t c = 0; c < p.head_dim; ++c)
      dot += double{in.at("q").row(b, h, i)[c]} * in.at("k").row(b, h / p.group(), j)[c];
    s.push_back(dot * p.softmax_scale);
    max = std::max(max, s.back());
    if (max_score) *max_score = std::max(*max_score, std::abs(s.back()));
  }
  for (double& x : s) sum += x = std::exp(x - max);
  for (double& x : s) x /= sum;
  return s;
}

TEST_CASE("every needle query sees one key", "[inputs]") {
  for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16})
    for (const int mask : {0, 1, 2}) {
      const Problem p = problem_with([&](Problem& x) {
        x.heads = 4, x.seqlen_q = x.seqlen_k = 300, x.dtype = dtype, x.inputs = InputKind::needle;
        x.causal = mask == 1;
        if (mask == 2) x.window_left = 40, x.window_right = 3;
      });
      const HostTensors in = draw(p);
      std::set<int64_t> needles;
      for (int64_t h = 0; h < p.heads; ++h)
        for (int64_t i = 0; i < p.seqlen_q; ++i) {
          const auto probability = probabilities(p, in, 0, h, i);
          const auto largest = std::max_element(probability.begin(), probability.end());
          INFO(p.text() << ": head " << h << ", row " << i);
          REQUIRE(*largest > 0.9);
          needles.insert(p.visible(i).begin + (largest - probability.begin()));
        }
      for (const int64_t edge : {0, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256}) {
        INFO(p.text() << ": key " << edge);
        CHECK(needles.count(edge) == 1);
      }
      // The last key is a needle if it is visible to more rows than the last.
      if (mask != 1) CHECK(needles.count(299) == 1);
    }
}

TEST_CASE("a needle row that sees nothing is still a number", "[inputs]") {
  const Problem p = problem_with([](Problem& x) {
    x.seqlen_q = 40, x.seqlen_k = 7, x.causal = true, x.inputs = InputKind::needle;
  });
  const HostTensors in = draw(p);
  for (const float x : in.at("q").data) REQUIRE(std::isfinite(x));
}

TEST_CASE("peaked inputs reach scores of 1e4 and have flat rows too", "[inputs]") {
  const Problem p = problem_with([](Problem& x) {
    x.heads = x.kv_heads = 4, x.seqlen_q = x.seqlen_k = 256, x.inputs = InputKind::peaked;
    x.dtype = DType::fp16;
  });
  const HostTensors in = draw(p);
  double highest = 0, flattest = INFINITY;
  for (int64_t i = 0; i < p.seqlen_q; ++i) {
    double of_row = 0;
    probabilities(p, in, 0, i % 4, i, &of_row);
    highest = std::max(highest, of_row);
    flattest = std::min(flattest, of_row);
  }
  CHECK(highest > 4e3);
  CHECK(highest < 2e4);
  CHECK(flattest < 3);
  for (const float x : in.at("q").data) REQUIRE(std::isfinite(x));  // fp16 ends at 65504
  CHECK(moments(in.at("k").data).variance == Approx(1).margin(0.05));
}

TEST_CASE("inputs are a function of the seed alone, rounded to their type", "[inputs]") {
  for (const InputKind kind : kKinds) {
    std::map<DType, HostTensors> drawn;
    for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16}) {
      const Problem p = problem_with([&](Problem& x) { x.inputs = kind, x.dtype = dtype; });
      Problem other = p;
      other.seed = 2;
      const HostTensors once = drawn[dtype] = draw(p), again = draw(p), another = draw(other);
      for (const auto& [tensor, values] : once) {
        INFO(name(kind) << " " << name(dtype) << " " << tensor);
        CHECK(values.data == again.at(tensor).data);
        CHECK(values.data != another.at(tensor).data);
        for (const float x : values.data) REQUIRE(round_to(dtype, x) == x);
      }
      CHECK(once.at("q").data != once.at("k").data);
      CHECK(once.at("k").data != once.at("v").data);
    }
    const std::vector<float>& exact = drawn[DType::fp32].at("k").data;
    for (const DType dtype : {DType::fp16, DType::bf16})  // the same numbers, rounded
      for (std::size_t i = 0; i < exact.size(); ++i)
        REQUIRE(drawn[dtype].at("k").data[i] == round_to(dtype, exact[i]));
  }
  // Fixed numbers: they must not change between machines or versions.
  CHECK(normal(1, 2, 3) == Approx(-0.39728812).epsilon(1e-6));
  CHECK(normal(1, 2, 2) == Approx(0.16973026).epsilon(1e-6));
  CHECK(normal(0, 0, 0) == Approx(0.79664325).epsilon(1e-6));
  CHECK(normal(42, 7, 1000000007) == Approx(-0.38328063).epsilon(1e-6));
}

// ---- tensors ----------------------------------------------------------------------------------

TEST_CASE("all 16-bit patterns survive the round trip", "[tensor]") {
  std::vector<uint16_t> patterns(65536), back(65536);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  for (const DType dtype : {DType::fp16, DType::bf16}) {
    std::vector<float> values(65536);
    decode(dtype, patterns.data(), patterns.size(), values.data());
    encode(dtype, values.data(), values.size(), back.data());
    const uint16_t infinity = dtype == DType::fp16 ? 0x7C00 : 0x7F80;
    for (std::size_t i = 0; i < patterns.size(); ++i) {
      const bool nan = (i & 0x7FFF) > infinity;
      REQUIRE(std::isnan(values[i]) == nan);
      REQUIRE(std::isinf(values[i]) == ((i & 0x7FFF) == infinity));
      if (nan)
        REQUIRE((back[i] & 0x7FFF) > infinity);  // still NaN
      else
        REQUIRE(back[i] == patterns[i]);
      // bf16 is the upper half of a float.
      const uint32_t upper = static_cast<uint32_t>(i) << 16;
      if (dtype == DType::bf16 && !nan) REQUIRE(std::memcmp(&upper, &values[i], 4) == 0);
    }
  }
  std::vector<float> floats = {1.5f, -0.0f, 1e-45f, INFINITY, -3e38f}, copy(floats.size());
  encode(DType::fp32, floats.data(), floats.size(), copy.data());
  CHECK(std::memcmp(floats.data(), copy.data(), floats.size() * 4) == 0);
}

TEST_CASE("rounding goes to the nearest even", "[tensor]") {
  CHECK(round_to(DType::fp32, 0.1f) == 0.1f);
  CHECK(round_to(DType::fp16, 2049.0f) == 2048.0f);  // ties to even
  CHECK(round_to(DType::fp16, 2051.0f) == 2052.0f);
  CHECK(round_to(DType::fp16, 2049.001f) == 2050.0f);
  CHECK(round_to(DType::fp16, 65519.0f) == 65504.0f);
  CHECK(round_to(DType::fp16, 65520.0f) == INFINITY);
  CHECK(round_to(DType::fp16, 0x1p-25f) == 0.0f);
  CHECK(round_to(DType::fp16, 0x1.8p-25f) == 0x1p-24f);
  CHECK(round_to(DType::bf16, 257.0f) == 256.0f);
  CHECK(round_to(DType::bf16, 259.0f) == 260.0f);
  CHECK(round_to(DType::bf16, -257.5f) == -258.0f);
  CHECK(round_to(DType::bf16, 3.4e38f) == INFINITY);
  CHECK(std::isnan(round_to(DType::bf16, NAN)));
  std::vector<float> many(3 << 20, 257.0f);  // several pieces, one per core
  round_to(DType::bf16, many.data(), many.size());
  CHECK(std::set<float>(many.begin(), many.end()) == std::set<float>{256.0f});
}

}  // namespace
