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

// A modified element of Q, K or V, and the resulting rows of O and lse.
struct Spoilt {
  const Problem& p;
  const HostTensors &right, &out;
  int64_t head, row, column;  // a query head for Q, a key/value head for K and V

  bool nan(int64_t h, int64_t i) const {
    const float* const o = out.at("o").row(0, h, i);
    return std::all_of(o, o + out.at("o").spec.columns(), [](float x) { return std::isnan(x); }) &&
           std::isnan(out.at("lse").row(0, h, i)[0]);
  }
  bool finite(int64_t h, int64_t i) const {
    const float* const o = out.at("o").row(0, h, i);
    return std::all_of(o, o + out.at("o").spec.columns(),
                       [](float x) { return std::isfinite(x); }) &&
           std::isfinite(out.at("lse").row(0, h, i)[0]);
  }
  // Equal within rounding: rows of one warp are rescaled together. `but`: a column to ignore.
  bool as_before(int64_t h, int64_t i, int64_t but = -1, double within = 0.05) const {
    const float *const o = out.at("o").row(0, h, i), *const before = right.at("o").row(0, h, i);
    double error = 0, size = 0;
    for (int64_t c = 0; c < out.at("o").spec.columns(); ++c) {
      if (c == but) continue;
      error += std::pow(double{o[c]} - before[c], 2), size += std::pow(double{before[c]}, 2);
    }
    const float lse = out.at("lse").row(0, h, i)[0], lse_before = right.at("lse").row(0, h, i)[0];
    return error <= within * within * size &&
           (lse == lse_before || std::abs(lse - lse_before) < 0.2f * static_cast<float>(within));
  }
  // Whether the query tile of row i cannot visit the tile of key `row`: no tile has more than 192
  // queries or 128 keys. Chapter 01 multiplies all of P with V.
  bool far(int64_t i) const {
    return p.seqlen_q > 192 && p.causal && i < 128 && chapter().name != "01_naive";
  }
  bool coded() const { return bits_of(p.dtype) < 16; }
  bool group_of(int64_t h) const { return h / p.group() == head; }
  bool sees(int64_t i) const {
    const KeyRange keys = p.sequence(0).visible(i);
    return keys.begin <= row && row < keys.end;
  }
};

// A query whose score with the modified key is -inf gives it weight 0: the right result.
bool minus_infinity_for(const HostTensors& in, const Spoilt& s, int64_t h, int64_t i, float bad) {
  return std::isinf(bad) && in.at("q").row(0, h, i)[s.column] * bad < 0;
}

void check_query(const Spoilt& s) {
  for (int64_t h = 0; h < s.p.heads; ++h)
    for (int64_t i = 0; i < s.p.seqlen_q; ++i) {
      INFO("row " << i << " of head " << h);
      // int8 has no NaN: it propagates through the scale, which the rows of a tile share. In
      // chapter 08 Q is int8 even if P and V are e4m3.
      const bool of_int8 = s.p.dtype != DType::e4m3 || chapter().name == "08_quant_sparse";
      const bool shares = s.coded() && of_int8 && i / 128 == s.row / 128;
      if (h == s.head && i == s.row)
        CHECK(s.nan(h, i));
      else
        // If the mean of a Q tile is subtracted, the mean lacks a value, which changes the 4-bit
        // codes.
        CHECK((s.as_before(h, i, -1, shares && h == s.head ? 0.2 : 0.05) ||
               (h == s.head && shares && s.nan(h, i))));
    }
}

void check_key(const HostTensors& in, const Spoilt& s, float bad) {
  for (int64_t h = 0; h < s.p.heads; ++h)
    for (int64_t i = 0; i < s.p.seqlen_q; ++i) {
      INFO("row " << i << " of head " << h);
      if (s.group_of(h) && s.sees(i) && minus_infinity_for(in, s, h, i, bad))
        CHECK((s.finite(h, i) || (s.coded() && s.nan(h, i))));
      else if (s.group_of(h) && s.sees(i))
        CHECK(s.nan(h, i));
      else  // for codes also rows multiplied with the key's group
        CHECK((s.as_before(h, i) || (s.coded() && s.group_of(h) && !s.far(i) && s.nan(h, i))));
    }
}

void check_value(const Spoilt& s) {
  for (int64_t h = 0; h < s.p.heads; ++h)
    for (int64_t i = 0; i < s.p.seqlen_q; ++i) {
      INFO("row " << i << " of head " << h);
      const bool reached = s.group_of(h) && s.sees(i);
      if (reached) CHECK_FALSE(std::isfinite(s.out.at("o").row(0, h, i)[s.column]));
      // A row without that key may still visit its tile, and then has NaN in that column. In a
      // quantised cache the token's scale propagates it to all columns.
      const bool compared = !s.group_of(h) || s.far(i);
      CHECK((s.as_before(h, i, compared ? -1 : s.column) || (s.coded() && reached && s.nan(h, i))));
    }
}

void check_all_steps(Backend backend) {
  int steps = 0, ran = 0;
  for (const Step& step : chapter().steps) {
    const Operation& op = *step.operation;
    if (!step.launch.on(backend)) continue;
    Problem p = problem(op.few_queries > 0 ? 3 : 300, 300, 64, quantises_to(step));
    p.heads = op.few_queries > 0 ? 4 : 2, p.kv_heads = 2, p.causal = true;
    if (op.name == "paged_mla") p.head_dim = 576, p.heads = 2, p.kv_heads = 1;
    if (takes(step, "devices"))  // ranks
      for (int rank = 0; rank < (backend == Backend::gpu ? 1 : 2); ++rank)
        p.own["devices"].push_back(rank);
    p.finish();  // before steps are asked: a softmax scale of 0 is refused
    if (refusal(step, p)) p.dtype = DType::fp32;
    if (refusal(step, p)) p.causal = false;
    if (refusal(step, p) && op.name == "paged_prefill") {
      p.causal = true, p.dtype = DType::bf16, p.varlen_q = {300}, p.varlen_k = {300};
      p.finish();
    }
    const std::vector<TensorSpec> outputs = op.outputs(p);
    const auto has = [&](const char* name) {
      return std::ranges::find(outputs, name, &TensorSpec::name) != outputs.end();
    };
    if (!has("o") || !has("lse")) continue;
    // In the emulator the first, the tuned and the last steps, and every third (step_cases.h).
    if (backend == Backend::emulated && !in_turn(step, 0)) continue;
    ++steps;
    if (refusal(step, p)) continue;
    ++ran;
    const HostTensors in = draw(op, p).tensors;
    const HostTensors right = outputs_of(step, p, in, backend);
    for (const char* tensor : {"q", "k", "v"}) {
      if (!in.contains(tensor)) continue;  // latent attention: V is part of K
      for (const float bad :
           {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
            -std::numeric_limits<float>::infinity()}) {
        if (bad < 0 && !in_turn(step, 0)) continue;
        const bool of_q = *tensor == 'q';
        const int64_t head = of_q ? 1 : p.kv_heads - 1, row = of_q ? p.seqlen_q - 2 : 298;
        const int64_t column = op.name == "paged_mla" ? 570 : 7;  // only in K
        INFO(step.name << ": " << tensor << "[" << head << ", " << row << "] = " << bad);
        HostTensors changed = in;
        const_cast<float*>(changed.at(tensor).row(0, head, row))[column] = bad;
        const HostTensors out = outputs_of(step, p, changed, backend);
        const Spoilt s{p, right, out, head, row, column};
        if (of_q) check_query(s);
        if (*tensor == 'k') check_key(in, s, bad);
        if (*tensor == 'v') check_value(s);
      }
    }
  }
  // Steps for masks, a canvas or packed sequences only need other problems.
  INFO(ran << " of " << steps << " steps");
  CHECK(4 * ran >= 3 * steps);
}

}  // namespace

TEST_CASE("NaN and infinities reach the rows that they belong to, and no other head",
          "[emulated][not_finite]") {
  check_all_steps(Backend::emulated);
}
TEST_CASE("NaN and infinities on the GPU reach the rows that they belong to", "[gpu][not_finite]") {
  check_all_steps(Backend::gpu);
}
