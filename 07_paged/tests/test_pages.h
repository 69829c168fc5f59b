// Shared by the tests of chapter 07: problems in pages, the decode steps.
#pragma once

#include "07_paged/host/paged.h"
#include "tests/step_cases.h"

namespace attn::tests {

inline Problem paged(int64_t queries, int64_t room, int64_t head_dim, int64_t page, DType dtype,
                     InputKind inputs = InputKind::random) {
  Problem p = problem(queries, room, head_dim, dtype, inputs);
  p.own["page_size"] = {static_cast<double>(page)};
  return p;
}

inline std::vector<const Step*> decode_steps() {
  std::vector<const Step*> steps;
  for (const Step& step : chapter().steps)
    if (step.operation->name == "paged_decode") steps.push_back(&step);
  return steps;
}

}  // namespace attn::tests
