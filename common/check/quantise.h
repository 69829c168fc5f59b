/// \file
/// The numbers that a quantised tensor represents, for the reference of a step that quantises its
/// inputs. Means are in double: a kernel, which adds in fp32 in some order, may store the
/// neighbouring code of a few numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attn/parallel_for.h"
#include "attn/tensor.h"

namespace attn {

/// Codes of a type. The absolute maximum of a group, at least `smallest`, has the code `largest`.
struct Codes {
  DType type;
  float largest, smallest;
};
/// That lower bound. It is larger for Q and K: their descales are multiplied, and the product must
/// not be 0.
inline float smallest_maximum(const HostTensor& t) {
  return t.spec.name == "v" ? 0x1p-80f : 1e-10f;
}
inline Codes int8_codes(const HostTensor& t, float largest = 127) {
  return {DType::int8, largest, smallest_maximum(t)};
}
inline Codes e4m3_codes(const HostTensor& t) { return {DType::e4m3, 448, smallest_maximum(t)}; }

/// Rounds each number to its code times its scale; the numbers of a group have the same scale.
/// `group_of(head, row, column)`, head by head of all sequences: groups are numbered from 0, those
/// of a head from `group_of(head, 0, 0)`.
template <class GroupOf>
void round_to_codes(HostTensor& t, const Codes& codes, GroupOf group_of) {
  t.spec.dtype = DType::fp32;
  const int64_t rows = t.spec.shape[2], d = t.spec.columns();
  const int64_t heads = static_cast<int64_t>(t.data.size()) / (rows * d);  // existing ones
  const auto for_each = [&](int64_t head, auto visit) {
    float* x = t.data.data() + head * rows * d;
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t c = 0; c < d; ++c) visit(*x++, static_cast<std::size_t>(group_of(head, row, c)));
  };
  const auto first_of = [&](int64_t head) {
    return static_cast<std::size_t>(group_of(head, 0, 0));
  };
  std::vector<std::vector<float>> of_heads(static_cast<std::size_t>(heads));
  parallel_for(heads, [&](int64_t head) {
    std::vector<float>& most = of_heads[static_cast<std::size_t>(head)];
    for_each(head, [&, first = first_of(head)](float x, std::size_t group) {
      if (group - first >= most.size()) most.resize(group - first + 1, codes.smallest);
      most[group - first] = std::max(most[group - first], std::abs(x));
    });
  });
  std::vector<float> most;  // of each group
  for (int64_t head = 0; head < heads; ++head) {
    const std::vector<float>& own = of_heads[static_cast<std::size_t>(head)];
    const std::size_t first = first_of(head);
    most.resize(std::max(most.size(), first + own.size()), codes.smallest);
    for (std::size_t i = 0; i < own.size(); ++i)
      most[first + i] = std::max(most[first + i], own[i]);
  }
  parallel_for(heads, [&](int64_t head) {
    for_each(head, [&](float& x, std::size_t group) {
      x = round_to(codes.type, x * (codes.largest / most[group])) * (most[group] / codes.largest);
    });
  });
}

/// A tensor like `t`: in the place of each number the mean of its column over a tile of `tile` rows
/// of its head.
HostTensor column_means(const HostTensor& t, int64_t tile);

/// t + factor * x, element by element.
void add_elements(HostTensor& t, const HostTensor& x, float factor = 1);

}  // namespace attn
