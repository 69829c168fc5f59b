/// \file
/// FlashAttention-1 on the CPU, for one head. Dao, Fu, Ermon, Rudra, Re, "FlashAttention" (arXiv
/// 2205.14135), Algorithm 1; the line numbers are the paper's. `State` is what the paper keeps in
/// HBM between visits.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

namespace flash1 {

using Eigen::Index;
using Matrix = Eigen::MatrixXd;
using Vector = Eigen::VectorXd;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// State of all rows between visits: linear in the length.
struct State {
  Matrix o;     // [seqlen_q, d], normalised after each visit
  Vector m, l;  // [seqlen_q]: maximum, and sum of exp(score - maximum), over the keys so far
  /// -inf for a fully masked row.
  Vector lse() const { return (l.array() > 0).select(m.array() + l.array().log(), -kInfinity); }
};

//! [visit]
/// One visit: merges a tile of keys into rows [row0, row0 + s.rows()). `s`: their scores, -inf
/// where masked.
inline void visit(State& state, Index row0, const Matrix& s, const Matrix& v) {
  for (Index i = 0; i < s.rows(); ++i) {
    double &m = state.m(row0 + i), &l = state.l(row0 + i);
    const double tile_max = s.row(i).maxCoeff();  // line 10
    if (std::isinf(tile_max)) continue;           // no visible key in this tile
    const double m_new = std::max(m, tile_max);   // line 11
    const Eigen::RowVectorXd p = (s.row(i).array() - m_new).exp();
    const double old_sum = l * std::exp(m - m_new), l_new = old_sum + p.sum();
    state.o.row(row0 + i) = (old_sum * state.o.row(row0 + i) + p * v) / l_new;  // line 12
    m = m_new, l = l_new;                                                       // line 13
  }
}
//! [visit]

//! [forward]
/// softmax(scale Q K^T) V with tiles of block_m queries and block_n keys. Causal: aligned at the
/// bottom right. Apart from inputs and outputs no matrix is larger than a tile.
inline State forward(const Matrix& q, const Matrix& k, const Matrix& v, double scale, bool causal,
                     Index block_m, Index block_n) {
  State state{Matrix::Zero(q.rows(), v.cols()), Vector::Constant(q.rows(), -kInfinity),
              Vector::Zero(q.rows())};
  for (Index key0 = 0; key0 < k.rows(); key0 += block_n) {  // line 5: outer loop, K and V
    const Index keys = std::min(block_n, k.rows() - key0);
    const Matrix k_j = k.middleRows(key0, keys), v_j = v.middleRows(key0, keys);  // line 6
    for (Index row0 = 0; row0 < q.rows(); row0 += block_m) {  // line 7: inner loop, Q
      const Index rows = std::min(block_m, q.rows() - row0);
      const Index diagonal = row0 + k.rows() - q.rows();  // rightmost key visible to the first row
      // fully masked tile: skip
      if (causal && key0 > diagonal + rows - 1) continue;
      Matrix s = scale * q.middleRows(row0, rows) * k_j.transpose();  // lines 8, 9
      for (Index i = 0; causal && i < rows; ++i)
        for (Index j = std::max(Index{0}, diagonal + i + 1 - key0); j < keys; ++j)
          s(i, j) = -kInfinity;
      visit(state, row0, s, v_j);
    }
  }
  return state;
}
//! [forward]

}  // namespace flash1
