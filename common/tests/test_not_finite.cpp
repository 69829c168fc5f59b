/// \file
/// NaN and infinities in Q, K and V, in every forward step of every chapter (docs/notation.md, "NaN
/// and infinities"). Linked into every chapter's tests.
#include <cmath>
#include <limits>
#include <string>

#include "tests/step_cases.h"

using namespace attn;
using namespace attn::tests;

namespace {

HostTensors outputs_of(const Step& step, const Problem& p, const HostTensors& in) {
  choose_schedule(p.seed);
  Session session(p, *step.operation, Backend::emulated, in);
  REQUIRE(session.prepare(step).ok());
  REQUIRE(session.launch().ok());
  REQUIRE_FALSE(session.broken_guard());
  return session.outputs();
}

// One spoilt element of Q, K or V, and what each row of O and lse has become.
struct Spoilt {
  const Problem& p;
  const HostTensors &right, &out;
  int64_t head, row, column;  // of Q a query head, of K and V a key/value head

  bool nan(int64_t h, int64_t i) const {
    const float* const o = out.at("o").row(0, h, i);
    return std::all_of(o, o + out.at("o").spec.columns(), [](float x) { return std::isnan(x); }) &&
           std::isnan(out.at("lse").row(0, h, i)[0]);
  }
  bool finite(int64_t h, int64_t i) const {
    const float* const o = out.at("o").row(0, h, i);
    return std::all_of(o, o + out.at("o").spec.columns(), [](float x) { return std::isfinite(x); }) &&
           std::isfinite(out.at("lse").row(0, h, i)[0]);
  }
  // Within rounding: rows of one warp are rescaled together. `but`: a column that is not compared.
  bool as_before(int64_t h, int64_t i, int64_t but = -1) const {
    const float *const o = out.at("o").row(0, h, i), *const before = right.at("o").row(0, h, i);
    double error = 0, size = 0;
    for (int64_t c = 0; c < out.at("o").spec.columns(); ++c) {
      if (c == but) continue;
      error += std::pow(double{o[c]} - before[c], 2), size += std::pow(double{before[c]}, 2);
    }
    const float lse = out.at("lse").row(0, h, i)[0], lse_before = right.at("lse").row(0, h, i)[0];
    return error <= 0.05 * 0.05 * size &&
           (lse == lse_before || std::abs(lse - lse_before) < 1e-2f);
  }
  bool group_of(int64_t h) const { return h / p.group() == head; }
  bool sees(int64_t i) const {
    const KeyRange keys = p.sequence(0).visible(i);
    return keys.begin <= row && row < keys.end;
  }
};

// A query whose score with the spoilt key is -inf has no weight there: that is its right result.
bool minus_infinity_for(const HostTensors& in, const Spoilt& s, int64_t h, int64_t i, float bad) {
  return std::isinf(bad) && in.at("q").row(0, h, i)[s.column] * bad < 0;
}

void check_query(const Spoilt& s) {
  for (int64_t h = 0; h < s.p.heads; ++h)
    for (int64_t i = 0; i < s.p.seqlen_q; ++i) {
      INFO("row " << i << " of head " << h);
      // Whole numbers have no NaN: it is in the scale, which other rows of the tile share.
      const bool shares_scale = bits_of(s.p.dtype) < 16 && h == s.head;
      if (h == s.head && i == s.row)
        CHECK(s.nan(h, i));
      else
        CHECK((s.as_before(h, i) || (shares_scale && s.p.dtype != DType::e4m3 && s.nan(h, i))));
    }
}

void check_key(const HostTensors& in, const Spoilt& s, float bad) {
  for (int64_t h = 0; h < s.p.heads; ++h)
    for (int64_t i = 0; i < s.p.seqlen_q; ++i) {
      INFO("row " << i << " of head " << h);
      if (s.group_of(h) && s.sees(i) && minus_infinity_for(in, s, h, i, bad))
        CHECK((s.finite(h, i) || (bits_of(s.p.dtype) < 16 && s.nan(h, i))));
      else if (s.group_of(h) && s.sees(i))
        CHECK(s.nan(h, i));
      else
        CHECK((s.as_before(h, i) || (s.group_of(h) && s.nan(h, i))));
    }
}

void check_value(const Spoilt& s) {
  for (int64_t h = 0; h < s.p.heads; ++h)
    for (int64_t i = 0; i < s.p.seqlen_q; ++i) {
      INFO("row " << i << " of head " << h);
      const bool finite = std::isfinite(s.out.at("o").row(0, h, i)[s.column]);
      if (s.group_of(h) && s.sees(i)) CHECK_FALSE(finite);
      // In a cache of few bits the scale of the token carries it.
      const bool of_token = bits_of(s.p.dtype) < 16 && s.group_of(h) && s.sees(i);
      CHECK((s.as_before(h, i, s.group_of(h) ? s.column : -1) || (of_token && s.nan(h, i))));
    }
}

}  // namespace

TEST_CASE("NaN and infinities reach the rows that they belong to, and no other head",
          "[emulated][not_finite]") {
  for (const Step& step : chapter().steps) {
    const Operation& op = *step.operation;
    Problem p = problem(op.few_queries > 0 ? 3 : 150, 150, 64, quantises_to(step));
    p.heads = 4, p.kv_heads = 2, p.causal = true;
    if (refusal(step, p)) p.dtype = DType::fp32;
    if (refusal(step, p)) p.causal = false;
    p.finish();
    if (refusal(step, p)) continue;
    const HostTensors in = draw(op, p).tensors;
    const std::vector<TensorSpec> outputs = op.outputs(p);
    const auto has = [&](const char* name) {
      return std::ranges::find(outputs, name, &TensorSpec::name) != outputs.end();
    };
    if (!has("o") || !has("lse") || !in.contains("q") || !in.contains("v")) continue;
    const HostTensors right = outputs_of(step, p, in);
    for (const char* tensor : {"q", "k", "v"})
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity()}) {
        const bool of_q = *tensor == 'q';
        const int64_t head = 1, row = of_q ? p.seqlen_q - 2 : 148, column = 7;
        INFO(step.name << ": " << tensor << "[" << head << ", " << row << "] = " << bad);
        HostTensors changed = in;
        const_cast<float*>(changed.at(tensor).row(0, head, row))[column] = bad;
        const HostTensors out = outputs_of(step, p, changed);
        const Spoilt s{p, right, out, head, row, column};
        if (of_q) check_query(s);
        if (*tensor == 'k') check_key(in, s, bad);
        if (*tensor == 'v') check_value(s);
      }
  }
}
