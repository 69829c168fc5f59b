// Attention of one head by the formula, for the tests of the chapters' CPU algorithms.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "tests/catch.h"

namespace attn::tests {

using Eigen::Index;
using Eigen::MatrixXd, Eigen::VectorXd;

inline MatrixXd random_matrix(Index rows, Index cols, double spread, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, spread);
  return MatrixXd::NullaryExpr(rows, cols, [&] { return normal(random); });
}

// O and lse by the formula, with all of S at once.
struct OneHead {
  MatrixXd o;
  VectorXd lse;
};
inline OneHead by_formula(const MatrixXd& q, const MatrixXd& k, const MatrixXd& v, double scale,
                          bool causal) {
  OneHead t{MatrixXd::Zero(q.rows(), v.cols()),
            VectorXd::Constant(q.rows(), -std::numeric_limits<double>::infinity())};
  for (Index i = 0; i < q.rows(); ++i) {
    const Index visible = causal ? std::max(Index{0}, i + k.rows() - q.rows() + 1) : k.rows();
    if (visible == 0) continue;
    const Eigen::RowVectorXd s = scale * q.row(i) * k.topRows(visible).transpose();
    const Eigen::RowVectorXd e = (s.array() - s.maxCoeff()).exp();
    t.o.row(i) = e * v.topRows(visible) / e.sum();
    t.lse(i) = s.maxCoeff() + std::log(e.sum());
  }
  return t;
}

inline void check_close(const MatrixXd& o, const VectorXd& lse, const OneHead& t) {
  REQUIRE(lse.size() == t.lse.size());
  CHECK((o - t.o).cwiseAbs().maxCoeff() < 1e-12);
  for (Index i = 0; i < lse.size(); ++i) {
    if (std::isinf(t.lse(i)))
      CHECK(lse(i) == t.lse(i));
    else
      CHECK(std::abs(lse(i) - t.lse(i)) < 1e-11 * (1 + std::abs(t.lse(i))));
  }
}

}  // namespace attn::tests
