/// \file
/// FlashAttention-2 on the CPU, for one head. Dao, "FlashAttention-2" (arXiv 2307.08691), Algorithm
/// 1; the line numbers are the paper's.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

namespace flash2 {

using Eigen::Index;
using Matrix = Eigen::MatrixXd;
using Vector = Eigen::VectorXd;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The outputs. Nothing else is ever stored.
struct Result {
  Matrix o;    // [seqlen_q, d]
  Vector lse;  // [seqlen_q]: -inf for a fully masked row
};

/// How the causal mask applies to keys [key0, key0 + keys) of queries [row0, row0 + rows).
enum class BlockClass { skipped, masked, unmasked };

//! [classify]
/// Causal, aligned at the bottom right: the last visible key of query i is i + seqlen_k - seqlen_q.
/// A fully masked block is skipped; a fully visible one needs no mask. A partial last block counts
/// only the keys that exist, so it may be unmasked.
inline BlockClass classify(Index row0, Index rows, Index key0, Index keys, Index shift,
                           bool causal) {
  if (!causal) return BlockClass::unmasked;
  // last visible key of the first and of the last row
  const Index first_sees = row0 + shift, last_sees = row0 + rows - 1 + shift;
  if (key0 > last_sees) return BlockClass::skipped;
  return key0 + keys - 1 > first_sees ? BlockClass::masked : BlockClass::unmasked;
}
//! [classify]

//! [forward]
/// softmax(scale Q K^T) V with tiles of block_m queries and block_n keys.
inline Result forward(const Matrix& q, const Matrix& k, const Matrix& v, double scale, bool causal,
                      Index block_m, Index block_n) {
  Result result{Matrix::Zero(q.rows(), v.cols()), Vector::Constant(q.rows(), -kInfinity)};
  const Index shift = k.rows() - q.rows();
  // line 3: outer loop, Q; each iteration is a thread block
  for (Index row0 = 0; row0 < q.rows(); row0 += block_m) {
    const Index rows = std::min(block_m, q.rows() - row0);
    const Matrix q_i = q.middleRows(row0, rows);  // line 4
    Matrix o = Matrix::Zero(rows, v.cols());      // line 5: on chip until the end
    Vector m = Vector::Constant(rows, -kInfinity), l = Vector::Zero(rows);
    for (Index key0 = 0; key0 < k.rows(); key0 += block_n) {  // line 6: inner loop, K and V
      const Index keys = std::min(block_n, k.rows() - key0);
      const BlockClass kind = classify(row0, rows, key0, keys, shift, causal);
      if (kind == BlockClass::skipped) break;                         // so are all blocks after it
      Matrix s = scale * q_i * k.middleRows(key0, keys).transpose();  // line 8
      for (Index i = 0; kind == BlockClass::masked && i < rows; ++i)
        for (Index j = std::max(Index{0}, row0 + i + shift + 1 - key0); j < keys; ++j)
          s(i, j) = -kInfinity;
      for (Index i = 0; i < rows; ++i) {
        const double m_new = std::max(m(i), s.row(i).maxCoeff());  // line 9
        if (std::isinf(m_new)) continue;                           // no visible key so far
        const Eigen::RowVectorXd p = (s.row(i).array() - m_new).exp();
        const double rescale = std::exp(m(i) - m_new);
        l(i) = rescale * l(i) + p.sum();
        o.row(i) = rescale * o.row(i) + p * v.middleRows(key0, keys);  // line 10: unnormalised
        m(i) = m_new;
      }
    }
    for (Index i = 0; i < rows; ++i) {
      if (l(i) == 0) continue;
      result.o.row(row0 + i) = o.row(i) / l(i);      // line 12: one division
      result.lse(row0 + i) = m(i) + std::log(l(i));  // line 13
    }
  }
  return result;
}
//! [forward]

}  // namespace flash2
