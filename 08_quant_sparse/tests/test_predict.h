// Shared by the tests of steps that choose: problems for them, and their choices.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "08_quant_sparse/host/predict.h"
#include "attn/error.h"
#include "check/field.h"
#include "tests/step_cases.h"

namespace attn::tests {

inline Problem on_canvas(const std::string& canvas, int64_t text, int64_t d,
                         DType dtype = DType::bf16) {
  Problem p = problem(1, 1, d, dtype);
  p.own["field"] = read_field(canvas);
  p.seqlen_q = p.seqlen_k = field_of(p).tokens() + text;
  return p;
}

// Problems that combine choices with other masks: fields, where block means are representative, and
// other inputs on request.
template <class Body>
int chosen_problems(Body body) {
  constexpr int64_t kDims[] = {128, 64, 256};
  const std::map<std::string, std::vector<double>> kRules[] = {
      {{"keep", {0.3}}},
      {{"keep_mass", {0.9}}, {"keep_sink", {1}}},
      {{"keep", {0}}, {"keep_diagonal", {1}}},
      {},
      {{"keep", {0.4}}, {"keep_sink", {1}}, {"keep_diagonal", {1}}},
      {{"keep_mass", {0.5}}},
      {{"keep_mass", {1}}, {"similarity", {0.5}}}};
  constexpr int64_t kPairs[][2] = {{300, 700}, {513, 513}, {70, 1030}, {900, 400}, {1, 640}};
  int n = 0;
  for (const auto& rule : kRules)
    for (const bool smooth : {true, false}) {
      Problem p = on_canvas("8x8x12", n % 3 == 0 ? 0 : 77, kDims[n % 3],
                            n % 2 == 0 ? DType::bf16 : DType::fp16);
      p.own["similarity"] = {0.05};  // text has about 1/77
      if (!smooth) {
        p = problem(kPairs[n / 2 % 5][0], kPairs[n / 2 % 5][1], kDims[n % 3], p.dtype,
                    n % 4 == 1 ? InputKind::needle : InputKind::peaked);
        p.own["similarity"] = {n % 3 == 0 ? 0.0 : 0.0078};  // random rows have 1/128
      }
      for (const auto& [name, value] : rule) p.own[name] = value;
      p.batch = 1 + n % 2, p.heads = 4, p.kv_heads = n % 4 < 2 ? 2 : 1;
      p.causal = n % 3 == 1;
      if (n % 5 == 2) p.window_left = 300, p.window_right = 30;
      p.seed = static_cast<uint64_t>(++n);
      p.finish();
      body(p);
    }
  return n;
}

// The blocks that each query tile of head h chooses: "1.1." for two of four.
inline std::vector<std::string> rows_of(const Problem& p, const BlockMask& mask, int64_t h = 0) {
  std::vector<std::string> rows;
  for (int64_t m = 0; m < mask.shape()[2]; ++m) {
    rows.emplace_back();
    for (int64_t n = 0; n < mask.shape()[3]; ++n) rows.back() += mask.open(0, h, m, n) ? '1' : '.';
  }
  (void)p;
  return rows;
}

}  // namespace attn::tests
