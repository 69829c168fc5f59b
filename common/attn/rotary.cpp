#include "attn/rotary.h"

#include <algorithm>
#include <cmath>

namespace attn {
namespace {

constexpr double kBase = 10000;

void angles(const Problem& p, HostTensor& t) {
  const int64_t half = p.head_dim / 2, first = -rotary_row_of_keys(p);
  for (int64_t c = 0; c < half; ++c) {
    const double step = std::pow(kBase, -static_cast<double>(c) / static_cast<double>(half));
    for (int64_t row = 0; row < t.spec.shape[2]; ++row) {
      const double angle = static_cast<double>(first + row) * step;
      const auto at = static_cast<std::size_t>(row * p.head_dim + c);
      t.data[at] = static_cast<float>(std::cos(angle));
      t.data[at + static_cast<std::size_t>(half)] = static_cast<float>(std::sin(angle));
    }
  }
}

template <class Scalar>
void turn_input(const InputRow<Scalar>& row) {
  const auto table = row.inputs.find("cos_sin");
  if (table == row.inputs.end()) return;
  const Problem& p = row.problem;
  const int64_t first = row.of_q ? rotary_row_of_queries(p) : rotary_row_of_keys(p);
  turn(row.x, table->second.row(0, 0, first + row.i));
}

}  // namespace

int64_t rotary_row_of_queries(const Problem& p) {
  return std::max<int64_t>(0, p.seqlen_k - p.seqlen_q);
}
int64_t rotary_row_of_keys(const Problem& p) {
  return std::max<int64_t>(0, p.seqlen_q - p.seqlen_k);
}

TensorSpec rotary_table(const Problem& p) {
  const int64_t positions = std::max(p.seqlen_q, p.seqlen_k);
  return {"cos_sin", {1, 1, positions, p.head_dim}, DType::fp32, {}, angles, false, 2};
}

Feature rotary_feature() {
  return {.name = "rotary",
          .lacking = "rotary embedding",
          .help =
              "rotary embedding (RoPE) of Q and K: key j is at position j, "
              "query i at i + seqlen_k - seqlen_q",
          .rows = turn_input<double>,
          .rows_low = turn_input<float>};
}

bool has_rotary(const Problem& p) { return p.own.contains("rotary"); }

}  // namespace attn
