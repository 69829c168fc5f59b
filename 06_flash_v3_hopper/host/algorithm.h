/// \file
/// FlashAttention-3 on the CPU, for one head: chapter 04's algorithm in the order in which this
/// chapter's kernels issue it. Shah et al., "FlashAttention-3" (arXiv 2407.08608), Algorithm 2,
/// plus a rescale with a threshold, which the paper does not have.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

namespace flash3 {

using Eigen::Index;
using Matrix = Eigen::MatrixXd;
using Vector = Eigen::VectorXd;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Result {
  Matrix o;            // [seqlen_q, d]
  Vector lse;          // [seqlen_q]: -inf for a fully masked row
  Index rescales = 0;  // rescaled rows of O, over all blocks
};

//! [softmax]
/// S of one key block becomes P, relative to m, which lags behind the maximum by at most
/// `threshold`. `rescale` is the factor of l, and of O once no MMA in flight adds to it.
inline void online_softmax(Matrix& s, Vector& m, Vector& l, Vector& rescale, double threshold) {
  for (Index i = 0; i < s.rows(); ++i) {
    const double max = s.row(i).maxCoeff();
    const bool grown = max > m(i) + threshold;  // no visible key so far: any score replaces it
    rescale(i) = grown ? std::exp(m(i) - max) : 1;
    if (grown) m(i) = max;
    for (Index j = 0; j < s.cols(); ++j) s(i, j) = std::isinf(m(i)) ? 0 : std::exp(s(i, j) - m(i));
    l(i) = rescale(i) * l(i) + s.row(i).sum();
  }
}
//! [softmax]

//! [forward]
/// softmax(scale Q K^T) V with tiles of block_m queries and block_n keys. A line marked "issued"
/// does not wait on a GPU; its result is used after the line marked "awaited".
inline Result forward(const Matrix& q, const Matrix& k, const Matrix& v, double scale, bool causal,
                      Index block_m, Index block_n, double threshold) {
  Result result{Matrix::Zero(q.rows(), v.cols()), Vector::Constant(q.rows(), -kInfinity)};
  const Index shift = k.rows() - q.rows(), num_n_blocks = (k.rows() + block_n - 1) / block_n;
  for (Index row0 = 0; row0 < q.rows(); row0 += block_m) {
    const Index rows = std::min(block_m, q.rows() - row0);
    const auto keys = [&](Index j) { return std::min(block_n, k.rows() - j * block_n); };
    const auto scores = [&](Index j) {
      Matrix s = scale * q.middleRows(row0, rows) * k.middleRows(j * block_n, keys(j)).transpose();
      for (Index i = 0; causal && i < rows; ++i)
        for (Index c = 0; c < keys(j); ++c)
          if (j * block_n + c > row0 + i + shift) s(i, c) = -kInfinity;
      return s;
    };
    Matrix o = Matrix::Zero(rows, v.cols());
    Vector m = Vector::Constant(rows, -kInfinity), l = Vector::Zero(rows), rescale(rows);
    Matrix p = scores(0);  // the first S has no P V to overlap with
    online_softmax(p, m, l, rescale, threshold);
    for (Index j = 1; j < num_n_blocks; ++j) {
      Matrix s = scores(j);                                   // issued and awaited
      o += p * v.middleRows((j - 1) * block_n, keys(j - 1));  // issued
      online_softmax(s, m, l, rescale, threshold);            // overlaps with P V
      result.rescales += (rescale.array() != 1).count();      // for a test
      o.array().colwise() *= rescale.array();                 // P V is awaited
      p = s;
    }
    o += p * v.middleRows((num_n_blocks - 1) * block_n, keys(num_n_blocks - 1));
    for (Index i = 0; i < rows; ++i) {
      if (l(i) == 0) continue;
      result.o.row(row0 + i) = o.row(i) / l(i);
      result.lse(row0 + i) = m(i) + std::log(l(i));
    }
  }
  return result;
}
//! [forward]

}  // namespace flash3
