/// \file
/// Textbook attention on the CPU, one head. Vaswani et al., "Attention Is All You Need"
/// (arXiv 1706.03762), section 3.2.1; gradients by the chain rule.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

namespace naive {

using Matrix = Eigen::MatrixXd;

/// Result of the forward pass. The backward pass needs P.
struct Forward {
  Matrix o;             // [seqlen_q, d]
  Matrix p;             // [seqlen_q, seqlen_k]
  Eigen::VectorXd lse;  // [seqlen_q]
};

/// O = softmax(scale * Q K^T) V. The causal mask is aligned at the bottom right.
inline Forward forward(const Matrix& q, const Matrix& k, const Matrix& v, double scale,
                       bool causal) {
  Matrix s = scale * q * k.transpose();  // (1) scores
  if (causal)
    for (Eigen::Index i = 0; i < s.rows(); ++i)
      for (Eigen::Index j = 0; j < s.cols(); ++j)
        if (j > i + s.cols() - s.rows()) s(i, j) = -std::numeric_limits<double>::infinity();
  Eigen::VectorXd lse(s.rows());  // (2) softmax of each row
  for (Eigen::Index i = 0; i < s.rows(); ++i) {
    const double row_max = s.row(i).maxCoeff();
    if (std::isinf(row_max)) {  // fully masked row
      lse(i) = row_max;
      s.row(i).setZero();
      continue;
    }
    s.row(i) = (s.row(i).array() - row_max).exp();
    const double row_sum = s.row(i).sum();
    s.row(i) /= row_sum;
    lse(i) = row_max + std::log(row_sum);
  }
  return {s * v, s, lse};  // (3) output
}

/// Gradients dQ, dK, dV, given dO and the P of the forward pass.
struct Gradients {
  Matrix dq, dk, dv;
};
inline Gradients backward(const Matrix& q, const Matrix& k, const Matrix& v, const Matrix& p,
                          const Matrix& d_o, double scale) {
  const Matrix dp = d_o * v.transpose();
  const Eigen::VectorXd d = (p.array() * dp.array()).rowwise().sum();
  const Matrix ds = scale * p.array() * (dp.colwise() - d).array();
  return {ds * k, ds.transpose() * q, p.transpose() * d_o};
}

}  // namespace naive
