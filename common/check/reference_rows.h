/// \file
/// Shared by the references: the selection of compared rows, and how an expected row is stored.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <vector>

#include "check/reference.h"

namespace attn::detail {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using MatrixF = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// The largest relative error of a row that the element type explains, with room for a kernel's
/// order of summation. test_check.cpp measures it against planted faults.
struct Bounds {
  double output, lse, gradient;
};
Bounds bounds_of(DType);

/// Below this value the spacing of a type's values no longer shrinks: 2^-14 is the smallest normal
/// fp16. bf16 and fp32 have the exponent range of float, and values here stay far from its lower
/// end.
double smallest_normal(DType);

/// Some rows of one head.
struct HeadRows {
  int64_t b, h;
  std::vector<int64_t> rows;
};
/// The sequence with the most visible pairs; on a tie, the last. A sample without it might consist
/// of empty sequences.
int64_t longest_sequence(const Problem&);
/// The rows to compare, in pieces of at most 64 rows of one head.
std::vector<HeadRows> select_rows(const Problem&, Selection);
/// The index of the first row of each piece, followed by the total.
std::vector<std::size_t> first_rows(const std::vector<HeadRows>&);

/// Stores row `r` of `e`. `squares` is the sum of the squares of its terms; `relative` is the
/// relative error of the terms that the scores cause.
template <class Ref, class Low, class Squares>
void store(Expected& e, std::size_t r, Expected::Row where, const Ref& ref, const Low& low,
           const Squares& squares, double relative) {
  const Eigen::Index columns = e.spec.columns();
  const std::size_t first = r * static_cast<std::size_t>(columns);
  e.rows[r] = where;
  for (Eigen::Index c = 0; c < columns; ++c) {
    e.reference[first + static_cast<std::size_t>(c)] = ref[c];
    e.low[first + static_cast<std::size_t>(c)] = low[c];
  }
  const double terms = std::sqrt(squares.sum());
  e.scale[r] = std::max(ref.norm(), terms);
  e.slack[r] = relative * terms + subnormal_slack(e.spec);
}

}  // namespace attn::detail
