// The gradients of the reference against finite differences of the textbook formula.
#include <map>
#include <string>

#include "check/reference.h"
#include "tests/textbook.h"

namespace {

using namespace attn;
using namespace attn::tests;

// The derivative of sum(dO * O) by each input, by central differences of that formula.
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
  check_backward(make(6, 3, true));  // queries 0 to 2 are fully masked
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
  for (unsigned options = 0; options < 192; options += options < 64 ? 1 : 7)
    check_backward(with_options(options));
  hidden = {};
}

TEST_CASE("gradients of what meets nothing are 0", "[reference]") {
  Problem p = with_options(1);
  p.finish();
  for (const Expected& e : backward_reference(p, draw(p), {})) {
    const int64_t alone =
        e.spec.name == "dq" ? 2 : 1;  // queries without keys, keys without queries
    int64_t rows = 0;
    for (std::size_t r = 0; r < e.rows.size(); ++r) {
      if (e.rows[r].b != alone) continue;
      ++rows;
      for (std::size_t c = 0; c < 5; ++c)
        CHECK((e.reference[r * 5 + c] == 0 && e.low[r * 5 + c] == 0));
    }
    CHECK(rows == (alone == 2 ? 3 * p.heads : 2 * p.kv_heads));
  }
}

TEST_CASE("low is the formula rounded to the element type", "[reference]") {
  for (const auto& [dtype, softcap] : {std::pair{DType::fp32, 0.0},
                                       {DType::fp16, 0.0},
                                       {DType::bf16, 0.0},
                                       {DType::fp32, 2.0},
                                       {DType::bf16, 2.0}}) {
    Problem p = make(40, 50, true);
    p.dtype = dtype, p.softcap = softcap;
    p.finish();
    const HostTensors in = draw(p);
    const double step = dtype == DType::fp32 ? 1e-6 : dtype == DType::fp16 ? 0x1p-11 : 0x1p-8;
    auto all = forward_reference(p, in, {});
    all.pop_back();  // lse is always float32
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
      CHECK(worst < 8 * step);  // a few rounding errors
    }
  }
}

}  // namespace
