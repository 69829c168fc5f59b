/// \file
/// The online softmax on the CPU, for one row: the algorithm of this chapter without anything a GPU
/// adds. Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867),
/// section 3; with a row of the output carried along, Rabe and Staats, "Self-attention Does Not
/// Need O(n^2) Memory" (arXiv 2112.05682), section 2.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

namespace online {

using Row = Eigen::RowVectorXd;
using Matrix = Eigen::MatrixXd;

//! [merge]
/// The maximum of some numbers and the sum of exp(number - maximum). (-inf, 0): of none.
struct SoftmaxState {
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
};

/// What a sum is multiplied by when its maximum becomes `to`. A sum of nothing stays nothing.
inline double rescale(double from, double to) { return std::isinf(from) ? 0 : std::exp(from - to); }

/// The pair of two disjoint sets together.
inline SoftmaxState merge(SoftmaxState a, SoftmaxState b) {
  const double max = std::max(a.max, b.max);
  return {max, a.sum * rescale(a.max, max) + b.sum * rescale(b.max, max)};
}
//! [merge]

/// The pair of a row: blocks of `block` numbers, one after the other.
inline SoftmaxState max_sum(const Row& x, Eigen::Index block) {
  SoftmaxState seen;
  for (Eigen::Index first = 0; first < x.size(); first += block) {
    const auto part = x.segment(first, std::min(block, x.size() - first));
    const double max = part.maxCoeff();
    seen = merge(seen, {max, std::isinf(max) ? 0 : (part.array() - max).exp().sum()});
  }
  return seen;
}

/// softmax(x): one pass for the pair, one for the quotients. 0 where x is -inf alone.
inline Row softmax(const Row& x, Eigen::Index block) {
  const SoftmaxState seen = max_sum(x, block);
  if (seen.sum == 0) return Row::Zero(x.size());
  return (x.array() - seen.max).exp() / seen.sum;
}

/// One query: the pair, and the sum of exp(score - max) * value beside it.
struct Attention {
  SoftmaxState seen;
  Row o;  // [d], divided by the sum at the end alone
};

//! [attention]
/// softmax(scale q K^T) V in one pass over blocks of K and V; no row of scores longer than a block.
inline Row attention(const Row& q, const Matrix& k, const Matrix& v, double scale,
                     Eigen::Index block) {
  Attention a{{}, Row::Zero(v.cols())};
  for (Eigen::Index first = 0; first < k.rows(); first += block) {
    const Eigen::Index count = std::min(block, k.rows() - first);
    const Row score = scale * q * k.middleRows(first, count).transpose();
    const double max = score.maxCoeff();
    const Row weight = (score.array() - max).exp();
    const SoftmaxState now = merge(a.seen, {max, weight.sum()});
    a.o = a.o * rescale(a.seen.max, now.max) +
          weight * v.middleRows(first, count) * rescale(max, now.max);
    a.seen = now;
  }
  return a.o / a.seen.sum;
}
//! [attention]

}  // namespace online
