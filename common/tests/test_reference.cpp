// The reference, against the textbook formula with three loops.
#include "check/reference.h"

#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "attn/error.h"
#include "check/operation.h"
#include "tests/textbook.h"

namespace {

using namespace attn;
using namespace attn::tests;

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
  double pairs = 0;
  for (const auto& [b, h, i] : seen) {
    const Lengths n = lengths(p, b);
    for (int64_t j = 0; j < n.k; ++j) pairs += sees(p, n, b, h, i, j);
  }
  CHECK(p.total_pairs() == pairs);
  CHECK(forward().flop(p) == 4 * double(p.head_dim) * pairs);
}

TEST_CASE("forward_reference is the formula, for every mask", "[reference]") {
  for (const auto& [m, n] :
       {std::pair<int64_t, int64_t>{1, 1}, {7, 7}, {4, 9}, {9, 4}, {1, 6}, {6, 1}}) {
    check_forward(make(m, n));
    check_forward(make(m, n, true));
    for (const int64_t left : {-1, 0, 1, 3, 100})
      for (const int64_t right : {-1, 0, 1, 3, 100}) check_forward(make(m, n, false, left, right));
    check_forward(make(m, n, true, 2, 5));  // causal is the narrower mask
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
  Problem p = make(9, 4, true);  // queries 0 to 4 are fully masked
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

TEST_CASE("forward_reference is the formula, for every set of options", "[reference]") {
  for (unsigned options = 0; options < 192; ++options) check_forward(with_options(options));
  hidden = {};
  Problem p = make(1, 1);
  p.varlen_q = {70, 1, 130}, p.varlen_k = {90, 65, 40};  // more rows than are computed at once
  check_forward(p);
}

TEST_CASE("an operation's own feature changes scores", "[reference]") {
  // All scores of head 1 increase by 3: lse does too, and O is unchanged.
  const Feature shift{
      .name = "shift", .kind = Feature::Kind::number, .scores = [](const ScoreRow<double>& row) {
        for (double& x : row.scores) x += row.h == 1 ? row.problem.own.at("shift")[0] : 0;
      }};
  Problem p = make(5, 7, true);
  p.finish();
  const HostTensors in = draw(p);
  const auto without = attention_reference(p, in, {}, {shift});
  p.own["shift"] = {3};
  const auto with = attention_reference(p, in, {}, {shift});
  for (std::size_t n = 0; n < with[0].reference.size(); ++n)
    REQUIRE(with[0].reference[n] == Approx(without[0].reference[n]).margin(1e-13));
  for (std::size_t r = 0; r < with[1].rows.size(); ++r)
    CHECK(with[1].reference[r] ==
          Approx(without[1].reference[r] + (with[1].rows[r].h == 1 ? 3 : 0)));
}

TEST_CASE("an operation's own feature changes Q and K", "[reference]") {
  // Q times 3 and K times -2: equal to a scale of -6, in double and in low precision.
  static constexpr auto kFactor = [](const auto& row) {
    for (auto& x : row.x) x *= row.of_q ? 3 : -2;
    REQUIRE(row.i < (row.of_q ? row.problem.seqlen_q : row.problem.seqlen_k));
  };
  const Feature factors{.name = "factors",
                        .rows = [](const InputRow<double>& row) { kFactor(row); },
                        .rows_low = [](const InputRow<float>& row) { kFactor(row); }};
  Problem p = make(5, 7, true);
  p.finish();
  const HostTensors in = draw(p);
  p.own["factors"] = {1};
  const auto with = attention_reference(p, in, {}, {factors});
  p.own.clear(), p.softmax_scale *= -6;
  const auto without = attention_reference(p, in, {}, {factors});
  for (const std::size_t n : {0, 1})
    for (std::size_t at = 0; at < with[n].reference.size(); ++at) {
      CHECK(with[n].reference[at] == Approx(without[n].reference[at]).margin(1e-12));
      CHECK(with[n].low[at] == Approx(without[n].low[at]).margin(2e-2));
    }
}

TEST_CASE("masks are held to the shape of their problem", "[reference]") {
  const auto refused = [](Problem p, std::shared_ptr<const KeyMask> mask) {
    p.mask = std::move(mask);
    try {
      p.finish();
    } catch (const InputError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const Problem p = make(5, 7);
  const auto blocks = [](std::vector<int64_t> shape) {
    return std::make_shared<BlockMask>(
        2, 3, shape,
        std::vector<bool>(static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3]),
                          true));
  };
  CHECK(refused(p, blocks({2, 4, 3, 3})) == "");
  CHECK(refused(p, blocks({1, 1, 3, 3})) == "");
  CHECK(refused(p, blocks({2, 4, 3, 2})) ==
        "block_mask: is [2, 4, 3, 2], must be [2 or 1, 4 or 1, 3, 3]");
  CHECK(refused(p, blocks({2, 2, 3, 3})).find("block_mask: is [2, 2, 3, 3]") == 0);
  const std::vector<int64_t> seven(7, 0);
  CHECK(refused(p, std::make_shared<ColumnIntervals>(std::vector<int64_t>{1, 1, 1, 7}, seven,
                                                     seven)) == "");
  CHECK(refused(make(5, 8),
                std::make_shared<ColumnIntervals>(std::vector<int64_t>{1, 1, 1, 7}, seven, seven))
            .find("hidden_begin: is [1, 1, 1, 7]") == 0);
  CHECK_THROWS_AS(BlockMask(2, 3, {1, 1, 3, 3}, std::vector<bool>(8)), InputError);
}

TEST_CASE("pairs of column intervals, counted by keys and by queries", "[reference]") {
  std::mt19937_64 random(5);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % uint64_t(n)); };
  for (int n = 0; n < 400; ++n) {
    const int64_t rows = 1 + below(12), columns = 1 + below(12);
    Problem p = make(rows, columns, n % 3 == 0, below(8) - 1, below(8) - 1);
    p.finish();
    // Two intervals a key, some of which overlap, are empty or end before they begin.
    const auto draw_rows = [&] {
      std::vector<int64_t> values(static_cast<std::size_t>(2 * columns));
      for (int64_t& value : values) value = below(rows + 1);
      return values;
    };
    const ColumnIntervals mask({1, 1, 2, columns}, draw_rows(), draw_rows());
    const Problem one = p.sequence(0);
    REQUIRE(mask.visible_pairs(one, 0, 0) == mask.KeyMask::visible_pairs(one, 0, 0));
  }
}

TEST_CASE("fully masked rows are 0 and -inf", "[reference]") {
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
    CHECK(rows.count({1, 11}) == 1);  // the last head exposes wrong strides
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
  for (std::size_t t = 0; t < 3; ++t)  // the last head of the full result
    for (std::size_t n = 0; n < sample[t].reference.size(); ++n)
      REQUIRE(sample[t].reference[n] ==
              full[t].reference[full[t].reference.size() - sample[t].reference.size() + n]);
}

}  // namespace
