/// \file
/// Online softmax on the CPU, one row. Milakov and Gimelshein, "Online normalizer calculation for
/// softmax" (arXiv 1805.02867), section 3. With a row of O in the state: Rabe and Staats,
/// "Self-attention Does Not Need O(n^2) Memory" (arXiv 2112.05682), section 2.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

namespace online {

using Row = Eigen::RowVectorXd;
using Matrix = Eigen::MatrixXd;

//! [merge]
/// The (m, l) state of a set of elements: max, and sum of exp(x - max). Empty set: (-inf, 0).
struct SoftmaxState {
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
};

/// Rescale factor of a sum when its maximum changes to `to`. An empty set's sum stays 0.
inline double rescale(double from, double to) {
  return from == -INFINITY ? 0 : std::exp(from - to);
}

/// The state of the union of two disjoint sets.
inline SoftmaxState merge(SoftmaxState a, SoftmaxState b) {
  const double max = std::max(a.max, b.max);
  return {max, a.sum * rescale(a.max, max) + b.sum * rescale(b.max, max)};
}
//! [merge]

/// The state of a row, computed in blocks of `block` elements.
inline SoftmaxState max_sum(const Row& x, Eigen::Index block) {
  SoftmaxState state;
  for (Eigen::Index first = 0; first < x.size(); first += block) {
    const auto part = x.segment(first, std::min(block, x.size() - first));
    const double max = part.maxCoeff();
    state = merge(state, {max, max == -INFINITY ? 0 : (part.array() - max).exp().sum()});
  }
  return state;
}

/// softmax(x): one pass for the state, one for the normalisation. All 0 if all of x is -inf.
inline Row softmax(const Row& x, Eigen::Index block) {
  const SoftmaxState state = max_sum(x, block);
  if (state.sum == 0) return Row::Zero(x.size());
  return (x.array() - state.max).exp() / state.sum;
}

/// One query: the (m, l) state, and the sum of exp(score - max) * value.
struct Attention {
  SoftmaxState state;
  Row o;  // [d], unnormalised
};

//! [attention]
/// softmax(scale q K^T) V in one pass over K and V; at most `block` scores exist at a time.
inline Row attention(const Row& q, const Matrix& k, const Matrix& v, double scale,
                     Eigen::Index block) {
  Attention a{{}, Row::Zero(v.cols())};
  for (Eigen::Index first = 0; first < k.rows(); first += block) {
    const Eigen::Index count = std::min(block, k.rows() - first);
    const Row score = scale * q * k.middleRows(first, count).transpose();
    const double max = score.maxCoeff();
    const Row weight = (score.array() - max).exp();
    const SoftmaxState now = merge(a.state, {max, weight.sum()});
    a.o = a.o * rescale(a.state.max, now.max) +
          weight * v.middleRows(first, count) * rescale(max, now.max);
    a.state = now;
  }
  return a.o / a.state.sum;
}
//! [attention]

}  // namespace online
