// The reference that everything else is held to: against the textbook's formula with three loops,
// and its gradients against finite differences of that formula.
#include "attn/reference.h"

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "attn/inputs.h"
#include "attn/philox.h"
#include "tests/catch.h"

namespace {

using namespace attn;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Problem make(int64_t seqlen_q, int64_t seqlen_k, bool causal = false, int64_t left = -1,
             int64_t right = -1) {
  Problem p;
  p.batch = 2, p.heads = 4, p.kv_heads = 2, p.head_dim = 5;
  p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
  p.causal = causal, p.window_left = left, p.window_right = right;
  p.dtype = DType::fp32;
  return p;
}

HostTensors draw(const Problem& p) {
  return draw_inputs(p, std::vector<TensorSpec>{like_q(p, "q"), like_k(p, "k"), like_k(p, "v"), like_q(p, "do"),
                                                {"alibi", {1, 1, 1, p.heads}, DType::fp32}});
}

// Queries and keys of sequence b.
struct Lengths {
  int64_t q, k;
};
Lengths lengths(const Problem& p, int64_t b) {
  if (p.varlen_q.empty()) return {p.seqlen_q, p.seqlen_k};
  return {p.varlen_q[static_cast<std::size_t>(b)], p.varlen_k[static_cast<std::size_t>(b)]};
}

// The masks as design and documentation word them, pair by pair.
bool sees(const Problem& p, Lengths n, int64_t i, int64_t j) {
  const int64_t diagonal = i + n.k - n.q;  // the last query's is the last key
  if (p.causal && j > diagonal) return false;
  if (p.window_right >= 0 && j > diagonal + p.window_right) return false;
  return p.window_left < 0 || j >= diagonal - p.window_left;
}

// Tensors are doubles, so that they can be varied: [batch][heads][rows][d], with varlen [rows of all][heads][d].
using Tensor = std::vector<double>;
std::size_t place(const Problem& p, bool of_queries, int64_t b, int64_t h, int64_t i, int64_t c) {
  const int64_t heads = of_queries ? p.heads : p.kv_heads;
  int64_t row = (b * heads + h) * (of_queries ? p.seqlen_q : p.seqlen_k) + i;
  if (!p.varlen_q.empty()) {
    row = i;
    for (int64_t before = 0; before < b; ++before) row += of_queries ? lengths(p, before).q : lengths(p, before).k;
    row = row * heads + h;
  }
  return static_cast<std::size_t>(row * p.head_dim + c);
}

// One query: o [d], then lse.
std::vector<double> attend(const Problem& p, const Tensor& q, const Tensor& k, const Tensor& v,
                           int64_t b, int64_t h, int64_t i) {
  const int64_t hkv = h / (p.heads / p.kv_heads);
  const Lengths n = lengths(p, b);
  std::vector<double> s(static_cast<std::size_t>(n.k), -kInfinity);
  double max = -kInfinity;
  for (int64_t j = 0; j < n.k; ++j) {
    if (!sees(p, n, i, j)) continue;
    double dot = 0;
    for (int64_t c = 0; c < p.head_dim; ++c) dot += q[place(p, true, b, h, i, c)] * k[place(p, false, b, hkv, j, c)];
    double& score = s[static_cast<std::size_t>(j)];
    score = p.softmax_scale * dot;
    if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
    if (p.alibi) {
      REQUIRE((p.heads & (p.heads - 1)) == 0);
      const double slope = std::pow(2.0, -8.0 * static_cast<double>(h + 1) / static_cast<double>(p.heads));
      score -= slope * static_cast<double>(std::abs(i + n.k - n.q - j));
    }
    max = std::max(max, score);
  }
  std::vector<double> row(static_cast<std::size_t>(p.head_dim) + 1, 0.0);
  row.back() = -kInfinity;
  if (max == -kInfinity) return row;
  double sum = 0;
  for (const double score : s) sum += std::exp(score - max);
  for (int64_t j = 0; j < n.k; ++j) {
    double weight = std::exp(s[static_cast<std::size_t>(j)] - max) / sum;
    if (p.dropout > 0) {
      const bool kept = dropout_keeps(p.seed, b * p.heads + h, static_cast<int>(i), static_cast<int>(j),
                                      static_cast<int>(p.dropout * 256));
      weight *= kept ? 1 / (1 - p.dropout) : 0;
    }
    for (int64_t c = 0; c < p.head_dim; ++c)
      row[static_cast<std::size_t>(c)] += weight * v[place(p, false, b, hkv, j, c)];
  }
  row.back() = max + std::log(sum);
  return row;
}
Tensor doubles(const HostTensor& t) { return Tensor(t.data.begin(), t.data.end()); }

void check_forward(Problem p) {
  p.finish();
  INFO(p.text());
  const HostTensors in = draw(p);
  const Tensor q = doubles(in.at("q")), k = doubles(in.at("k")), v = doubles(in.at("v"));
  const auto expected = forward_reference(p, in, {});
  REQUIRE(expected.size() == 2);
  const Expected &o = expected[0], &lse = expected[1];
  CHECK(o.spec.name == "o");
  CHECK(lse.spec.name == "lse");
  int64_t queries = 0;
  for (int64_t b = 0; b < p.batch; ++b) queries += lengths(p, b).q;
  REQUIRE(o.rows.size() == static_cast<std::size_t>(p.heads * queries));
  REQUIRE(lse.rows.size() == o.rows.size());
  std::set<std::tuple<int64_t, int64_t, int64_t>> seen;
  for (std::size_t r = 0; r < o.rows.size(); ++r) {
    const auto [b, h, i] = o.rows[r];
    seen.insert({b, h, i});
    const auto row = attend(p, q, k, v, b, h, i);
    for (std::size_t c = 0; c + 1 < row.size(); ++c) {
      const double got = o.reference[r * (row.size() - 1) + c];
      if (row.back() == -kInfinity)
        REQUIRE(got == 0);
      else
        REQUIRE(got == Approx(row[c]).epsilon(1e-12).margin(1e-13));
    }
    REQUIRE((lse.rows[r].b == b && lse.rows[r].h == h && lse.rows[r].i == i));
    if (row.back() == -kInfinity)
      REQUIRE(lse.reference[r] == -kInfinity);
    else
      REQUIRE(lse.reference[r] == Approx(row.back()).epsilon(1e-12).margin(1e-13));
    REQUIRE((lse.low[r] == static_cast<float>(lse.reference[r]) ||
             std::abs(lse.low[r] - lse.reference[r]) < 1e-4 * std::max(1.0, std::abs(row.back()))));
  }
  CHECK(seen.size() == o.rows.size());
}

TEST_CASE("forward_reference is the formula, for every mask", "[reference]") {
  for (const auto& [m, n] :
       {std::pair<int64_t, int64_t>{1, 1}, {7, 7}, {4, 9}, {9, 4}, {1, 6}, {6, 1}}) {
    check_forward(make(m, n));
    check_forward(make(m, n, true));
    for (const int64_t left : {-1, 0, 1, 3, 100})
      for (const int64_t right : {-1, 0, 1, 3, 100}) check_forward(make(m, n, false, left, right));
    check_forward(make(m, n, true, 2, 5));  // causal is the narrower of the two
  }
}

TEST_CASE("forward_reference is the formula, for any heads and any scale", "[reference]") {
  for (const auto& [heads, kv_heads] :
       {std::pair<int64_t, int64_t>{1, 1}, {4, 4}, {6, 3}, {6, 2}, {7, 1}, {8, 1}}) {
    Problem p = make(5, 6, true);
    p.heads = heads, p.kv_heads = kv_heads;
    check_forward(p);
  }
  for (const double scale : {0.0, 1.0, 0.125, -0.5, 3.0}) {  // 0: the default, 1 / sqrt(d)
    Problem p = make(5, 6);
    p.softmax_scale = scale;
    check_forward(p);
  }
  Problem p = make(70, 130);  // more rows than are computed at once
  check_forward(p);
}

TEST_CASE("forward_reference caps scores before the mask", "[reference]") {
  for (const double cap : {0.25, 1.0, 15.0, 50.0, 1e6})
    for (const bool causal : {false, true}) {
      Problem p = make(5, 6, causal);
      p.softcap = cap, p.softmax_scale = 2;
      check_forward(p);
    }
  Problem p = make(9, 4, true);  // queries 0 to 4 see nothing
  p.softcap = 15;
  check_forward(p);
  p = make(5, 6);
  p.softcap = 3, p.softmax_scale = -0.5;
  check_forward(p);
}

TEST_CASE("forward_reference adds ALiBi, after the cap", "[reference]") {
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{7, 7}, {4, 9}, {9, 4}, {1, 6}, {70, 90}})
    for (const bool causal : {false, true})
      for (const double cap : {0.0, 2.0}) {
        Problem p = make(m, n, causal, causal ? -1 : 3, 2);
        p.alibi = true, p.softcap = cap;
        check_forward(p);
      }
}

// Five sequences: without queries, without keys, without either, and two with both. What each option does to them
// is asked for alone and together with the others.
Problem with_options(unsigned options) {
  Problem p = make(6, 5);
  if (options & 1) p.varlen_q = {4, 0, 3, 0, 5}, p.varlen_k = {3, 2, 0, 0, 6};
  if (options & 2) p.causal = true;
  if (options & 4) p.window_left = 2, p.window_right = 1;
  if (options & 8) p.softcap = 2, p.softmax_scale = 1.5;
  if (options & 16) p.alibi = true;
  if (options & 32) p.dropout = 0.25;
  return p;
}

TEST_CASE("forward_reference is the formula, for every set of options", "[reference]") {
  for (unsigned options = 0; options < 64; ++options) check_forward(with_options(options));
  Problem p = make(1, 1);
  p.varlen_q = {70, 1, 130}, p.varlen_k = {90, 65, 40};  // more rows than are computed at once
  check_forward(p);
}

TEST_CASE("rows with nothing to attend are 0 and -inf", "[reference]") {
  Problem p = make(9, 4, true);
  p.finish();
  const auto expected = forward_reference(p, draw(p), {});
  int empty = 0;
  for (std::size_t r = 0; r < expected[0].rows.size(); ++r) {
    const bool nothing = expected[0].rows[r].i < 5;
    empty += nothing;
    CHECK((expected[1].reference[r] == -kInfinity) == nothing);
    CHECK((expected[1].low[r] == -kInfinity) == nothing);
    for (std::size_t c = 0; c < 5; ++c) {
      CHECK((expected[0].reference[r * 5 + c] == 0) == nothing);
      CHECK((expected[0].low[r * 5 + c] == 0) == nothing);
    }
  }
  CHECK(empty == 2 * 4 * 5);
}

TEST_CASE("scores of +-1e4 neither overflow nor lose the small ones", "[reference]") {
  Problem p = make(1, 3);
  p.batch = p.heads = p.kv_heads = 1, p.head_dim = 1, p.softmax_scale = 1;
  HostTensors in = draw(p);
  in["q"].data = {100};
  in["v"].data = {1, 2, 4};
  for (const float sign : {1.0f, -1.0f}) {
    in["k"].data = {sign * 100, sign * 100.01f, sign * -100};
    const auto expected = forward_reference(p, in, {});
    const double top = 1e4, next = 100 * double{100.01f};
    const double e = std::exp(sign > 0 ? top - next : 0), f = std::exp(sign > 0 ? 0 : top - next);
    const double o = sign > 0 ? (e * 1 + f * 2) / (e + f) : 4.0;
    CHECK(expected[0].reference[0] == Approx(o).epsilon(1e-12));
    CHECK(expected[1].reference[0] ==
          Approx(sign > 0 ? next + std::log(e + f) : top).epsilon(1e-14));
    CHECK(expected[0].low[0] == Approx(o).epsilon(1e-2));
  }
}

// ---- samples ----------------------------------------------------------------------------------

TEST_CASE("a sample has the first, the last and the tile-edge rows of the whole", "[reference]") {
  Problem p = make(1000, 300);
  p.head_dim = 8, p.heads = 12, p.kv_heads = 3;
  p.finish();
  const HostTensors in = draw(p);
  const auto full = forward_reference(p, in, {});
  const auto sample = forward_reference(p, in, {false, 1e5});
  for (std::size_t t = 0; t < 2; ++t) {
    const std::size_t columns = static_cast<std::size_t>(full[t].spec.columns());
    std::map<std::tuple<int64_t, int64_t, int64_t>, std::size_t> whole;
    for (std::size_t r = 0; r < full[t].rows.size(); ++r)
      whole[{full[t].rows[r].b, full[t].rows[r].h, full[t].rows[r].i}] = r;
    std::map<std::pair<int64_t, int64_t>, std::set<int64_t>> rows;
    for (std::size_t r = 0; r < sample[t].rows.size(); ++r) {
      const auto [b, h, i] = sample[t].rows[r];
      CHECK(rows[{b, h}].insert(i).second);
      const std::size_t at_full = whole.at({b, h, i});
      REQUIRE(sample[t].scale[r] == Approx(full[t].scale[at_full]));
      for (std::size_t c = 0; c < columns; ++c)
        REQUIRE(sample[t].reference[r * columns + c] ==
                Approx(full[t].reference[at_full * columns + c]).epsilon(1e-12));
    }
    CHECK(sample[t].rows.size() < full[t].rows.size() / 10);
    CHECK(rows.count({0, 0}) == 1);
    CHECK(rows.count({1, 11}) == 1);  // the last head finds wrong strides
    for (const auto& [head, of_head] : rows)
      for (const int64_t i :
           {0, 15, 16, 31, 32, 63, 64, 127, 128, 895, 896, 959, 960, 991, 992, 999}) {
        INFO("row " << i);
        CHECK(of_head.count(i) == 1);
      }
  }
  CHECK(forward_reference(p, in, {false, 1e12})[0].rows.size() == full[0].rows.size());
}

TEST_CASE("a sample of a varlen batch has its longest sequence", "[reference]") {
  Problem p = make(1, 1);
  p.varlen_q = {0, 3, 700, 700, 0}, p.varlen_k = {900, 3, 3, 800, 0}, p.causal = true;
  p.finish();
  const HostTensors in = draw(p);
  std::map<int64_t, std::set<int64_t>> rows;
  const auto sample = forward_reference(p, in, {false, 1});
  for (const auto [b, h, i] : sample[0].rows) rows[b].insert(i);
  CHECK(rows.count(3) == 1);
  CHECK((rows[3].count(0) == 1 && rows[3].count(699) == 1));
  CHECK(rows[3].size() < 100);
  const auto gradients = backward_reference(p, in, {false, 1});
  std::set<int64_t> sequences;
  for (const auto [b, h, i] : gradients[0].rows) sequences.insert(b);
  CHECK(sequences == std::set<int64_t>{3});
}

TEST_CASE("a sample of gradients is whole heads with the same values", "[reference]") {
  Problem p = make(20, 30, true);
  p.finish();
  const HostTensors in = draw(p);
  const auto full = backward_reference(p, in, {});
  const auto sample = backward_reference(p, in, {false, 1});
  REQUIRE(full.size() == 3);
  CHECK(full[0].rows.size() == 2 * 4 * 20);
  CHECK(full[1].rows.size() == 2 * 2 * 30);
  CHECK(sample[0].rows.size() == 2 * 20);
  CHECK(sample[1].rows.size() == 30);
  for (std::size_t t = 0; t < 3; ++t)  // the last head of the whole
    for (std::size_t n = 0; n < sample[t].reference.size(); ++n)
      REQUIRE(sample[t].reference[n] ==
              full[t].reference[full[t].reference.size() - sample[t].reference.size() + n]);
}

// ---- gradients --------------------------------------------------------------------------------

// The derivative of sum(dO * O) by each input, by central differences of the formula above.
void check_backward(Problem p) {
  p.finish();
  INFO(p.text());
  const HostTensors in = draw(p);
  std::map<std::string, Tensor> x;
  for (const char* name : {"q", "k", "v", "do"}) x[name] = doubles(in.at(name));
  const auto loss = [&] {
    double sum = 0;
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t h = 0; h < p.heads; ++h)
        for (int64_t i = 0; i < lengths(p, b).q; ++i) {
          const auto o = attend(p, x["q"], x["k"], x["v"], b, h, i);
          for (int64_t c = 0; c < p.head_dim; ++c)
            sum += o[static_cast<std::size_t>(c)] * x["do"][place(p, true, b, h, i, c)];
        }
    return sum;
  };
  const auto expected = backward_reference(p, in, {});
  for (const Expected& e : expected) {
    Tensor& varied = x[e.spec.name.substr(1)];
    const std::size_t columns = static_cast<std::size_t>(p.head_dim);
    REQUIRE(e.reference.size() == varied.size());
    double worst = 0, size = 0;
    for (std::size_t r = 0; r < e.rows.size(); ++r)
      for (std::size_t c = 0; c < columns; ++c) {
        const auto [b, h, i] = e.rows[r];
        double& element = varied[place(p, e.spec.name == "dq", b, h, i, static_cast<int64_t>(c))];
        constexpr double kStep = 1e-5;
        const double before = element;
        element = before + kStep;
        const double above = loss();
        element = before - kStep;
        const double below = loss();
        element = before;
        const double numeric = (above - below) / (2 * kStep);
        worst = std::max(worst, std::abs(numeric - e.reference[r * columns + c]));
        size = std::max(size, std::abs(numeric));
      }
    INFO(e.spec.name << ": error " << worst << " of " << size);
    CHECK(size > 0);
    CHECK(worst < 1e-6 * size);
  }
}

TEST_CASE("backward_reference is the derivative of the formula", "[reference]") {
  check_backward(make(4, 5));
  check_backward(make(5, 5, true));
  check_backward(make(3, 6, true));
  check_backward(make(6, 3, true));  // queries 0 to 2 see nothing
  check_backward(make(5, 6, false, 1, 1));
  Problem p = make(3, 4);
  p.heads = 3, p.kv_heads = 1, p.softmax_scale = 0.8;
  check_backward(p);
  for (const double cap : {0.5, 2.0, 15.0, 50.0}) {
    Problem capped = make(5, 6, true);
    capped.softcap = cap, capped.softmax_scale = 1.5;
    check_backward(capped);
    capped.alibi = true;
    check_backward(capped);
  }
}

TEST_CASE("backward_reference is the derivative, for every set of options", "[reference]") {
  for (unsigned options = 0; options < 64; ++options) check_backward(with_options(options));
}

TEST_CASE("gradients of what meets nothing are 0", "[reference]") {
  Problem p = with_options(1);
  p.finish();
  for (const Expected& e : backward_reference(p, draw(p), {})) {
    const int64_t alone = e.spec.name == "dq" ? 2 : 1;  // queries without keys, keys without queries
    int64_t rows = 0;
    for (std::size_t r = 0; r < e.rows.size(); ++r) {
      if (e.rows[r].b != alone) continue;
      ++rows;
      for (std::size_t c = 0; c < 5; ++c) CHECK((e.reference[r * 5 + c] == 0 && e.low[r * 5 + c] == 0));
    }
    CHECK(rows == (alone == 2 ? 3 * p.heads : 2 * p.kv_heads));
  }
}

TEST_CASE("low is the formula rounded to the element type", "[reference]") {
  for (const auto& [dtype, softcap] :
       {std::pair{DType::fp32, 0.0}, {DType::fp16, 0.0}, {DType::bf16, 0.0}, {DType::fp32, 2.0}, {DType::bf16, 2.0}}) {
    Problem p = make(40, 50, true);
    p.dtype = dtype, p.softcap = softcap;
    p.finish();
    const HostTensors in = draw(p);
    const double step = dtype == DType::fp32 ? 1e-6 : dtype == DType::fp16 ? 0x1p-11 : 0x1p-8;
    auto all = forward_reference(p, in, {});
    all.pop_back();  // lse is float32 in any case
    for (Expected& e : backward_reference(p, in, {})) all.push_back(std::move(e));
    for (const Expected& e : all) {
      double worst = 0;
      const auto columns = static_cast<std::size_t>(e.spec.columns());
      for (std::size_t r = 0; r < e.rows.size(); ++r) {
        double error2 = 0;
        for (std::size_t c = 0; c < columns; ++c) {
          const float low = e.low[r * columns + c];
          REQUIRE(round_to(dtype, low) == low);
          error2 += std::pow(low - e.reference[r * columns + c], 2);
        }
        if (e.scale[r] > 0) worst = std::max(worst, std::sqrt(error2) / e.scale[r]);
      }
      INFO(name(dtype) << " " << e.spec.name << ": " << worst);
      CHECK(worst > 0);
      CHECK(worst < 8 * step);  // a few roundings
    }
  }
}

}  // namespace
