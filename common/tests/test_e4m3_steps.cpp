/// \file
/// Faults within the wide bound of P in e4m3, a tenth of a row: truncated P, an O that is some per
/// cent too large, a missing key. For every step of every chapter that rounds P to e4m3. Linked
/// into every chapter's tests.
#include <cmath>
#include <random>

#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

// Prefill steps only: with an e4m3 cache P has 16 bits.
template <class Body>
void each_e4m3_step(int64_t queries, int64_t keys, bool causal, Body body) {
  for (const Step& step : chapter().steps) {
    if (!takes(step, "e4m3") || step.operation->few_queries > 0) continue;
    Problem p = one_head(problem(queries, keys, 64, DType::e4m3));
    p.causal = causal;
    if (step.operation->name == "predict") p.own = {{"keep", {1}}, {"similarity", {-1}}};
    p.finish();
    if (refusal(step, p)) continue;
    INFO(step.name);
    body(step, p);
  }
}

}  // namespace

// Truncation reduces P by a thirtieth on average, and also O, because l is not truncated.
TEST_CASE("O of values that are all 1 is 1 in e4m3", "[emulated][fp8]") {
  each_e4m3_step(100, 290, false, [](const Step& step, const Problem& p) {
    HostTensors in = draw(*step.operation, p).tensors;
    for (float& x : in.at("q").data) x /= 2;  // similar weights: rounding errors average out
    round_to(DType::bf16, in.at("q").data.data(), in.at("q").data.size());
    std::ranges::fill(in.at("v").data, 1.0f);
    float least = 2, most = 0;
    const HostTensors out = outputs_of(step, p, in);
    for (const float o : out.at("o").data) least = std::min(least, o), most = std::max(most, o);
    INFO(least << " to " << most);
    CHECK(least > 0.99f);
    CHECK(most < 1.01f);
  });
}

// The second half of V is the negative of the first, so there is no mean to subtract. Rows of the
// first half have only positive visible values: truncating P or V, or a factor on O, changes their
// sum.
TEST_CASE("P and V are rounded to nearest in e4m3, and O has no factor", "[emulated][fp8]") {
  constexpr int64_t kHalf = 150, kFirst = 64;
  each_e4m3_step(2 * kHalf, 2 * kHalf, true, [](const Step& step, const Problem& p) {
    HostTensors in = draw(*step.operation, p).tensors;
    std::vector<float>& v = in.at("v").data;
    for (std::size_t i = 0; i < v.size() / 2; ++i) {
      v[i] = round_to(DType::bf16, 0.25f + std::abs(v[i]));
      v[v.size() / 2 + i] = -v[i];
    }
    const Expected expected = forward().reference(p, in, {}).front();
    const HostTensors out = outputs_of(step, p, in);
    double sum = 0, all = 0;
    for (std::size_t i = kFirst * 64; i < kHalf * 64; ++i)
      sum += double{out.at("o").data[i]}, all += expected.reference[i];
    INFO(sum / all);
    CHECK(std::abs(sum / all - 1) < 0.01);
  });
}

// Every query points at one key, away from tile edges: a step that misses it is wrong in all rows.
// A modified K without that key shows that the check detects this.
TEST_CASE("no key is missing in e4m3, wherever it is", "[emulated][fp8]") {
  std::mt19937 random(7);
  for (int n = 0; n < 4; ++n) {
    const auto key = static_cast<int64_t>(random() % 300);
    each_e4m3_step(40, 300, false, [&](const Step& step, const Problem& p) {
      INFO("key " << key);
      HostTensors in = draw(*step.operation, p).tensors;
      std::vector<float>&q = in.at("q").data, &k = in.at("k").data;
      const auto d = static_cast<std::size_t>(p.head_dim);
      float* const needle = k.data() + static_cast<std::size_t>(key) * d;
      double norm2 = 0;
      for (std::size_t c = 0; c < d; ++c) norm2 += double{needle[c]} * needle[c];
      for (std::size_t i = 0; i < q.size(); ++i)  // a score of 16, and some noise
        q[i] = round_to(
            DType::bf16,
            static_cast<float>(16 / (norm2 * p.softmax_scale)) * needle[i % d] + 0.1f * q[i]);
      const auto verdict = [&](const HostTensors& given) -> std::string {
        const HostTensors out = outputs_of(step, p, given);
        for (const Expected& e : expected_of(step, p, in, {}))
          if (const Verdict v = examine(out.at(e.spec.name), e, p, step); !v.pass)
            return failure_text(v);
        return "";
      };
      CHECK(verdict(in) == "");
      HostTensors without = in;
      std::fill_n(without.at("k").data.data() + static_cast<std::size_t>(key) * d, d, 0.0f);
      CHECK(verdict(without) != "");
    });
  }
}
