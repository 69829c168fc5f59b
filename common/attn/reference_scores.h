/// \file
/// What the references of the forward and of the backward pass share: P of some queries, in double and in the low
/// precision, and the errors that the types explain.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attn/philox.h"
#include "attn/reference_rows.h"

namespace attn::detail {

/// Rows that are computed at once.
constexpr int64_t kRowsAtOnce = 64;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The rows of one head, of which those of the other heads lie in between if the tensor is packed.
inline Eigen::Map<const MatrixF, 0, Eigen::OuterStride<>> head_of(const HostTensor& t, int64_t b, int64_t h) {
  const int64_t columns = t.spec.columns();
  return {t.row(b, h, 0), t.spec.rows_of(b), columns, Eigen::OuterStride<>(t.spec.row_step() * columns)};
}

// Of a head; 0 of one without rows.
template <class M>
double largest_norm(const M& rows) {
  return rows.rows() == 0 ? 0 : rows.template cast<double>().rowwise().norm().maxCoeff();
}

// P for the purpose of its rounding errors: a subnormal is as coarse as the smallest normal value.
template <class M>
M coarse(DType t, const M& p) {
  const double least = smallest_normal(t);
  return p.unaryExpr([least](double x) { return x > 0 && x < least ? least : x; });
}

// Sums in float32, term after term as a thread would add them: c += a b.
inline void multiply_in_order(const MatrixF& a, const MatrixF& b, MatrixF& c) {
  for (Eigen::Index k = 0; k < a.cols(); ++k) c.noalias() += a.col(k) * b.row(k);
}

inline void round_all(DType t, MatrixF& m) {
  for (Eigen::Index i = 0; i < m.size(); ++i) m.data()[i] = round_to(t, m.data()[i]);
}

// Scores, probabilities and lse of some queries of one head: [rows, seqlen_k].
template <class M>
struct Probabilities {
  M p;                      // normalised; 0 where masked
  M cap_slope;              // with a softcap: the derivative of the capped score by the score, 1 - tanh^2
  std::vector<double> lse;  // -inf where a row sees nothing
  template <class Q, class K>
  Probabilities(const Problem& problem, const Q& q, const K& k, const std::vector<int64_t>& rows, double slope) {
    using Scalar = typename M::Scalar;
    if constexpr (std::is_same_v<Scalar, float>) {
      p = M::Zero(q.rows(), k.rows());
      multiply_in_order(q, k.transpose(), p);
    } else {
      p.noalias() = q * k.transpose();
    }
    p *= static_cast<Scalar>(problem.softmax_scale);
    if (problem.softcap > 0) {
      const auto cap = static_cast<Scalar>(problem.softcap);
      p = (p.array() / cap).tanh();
      cap_slope = 1 - p.array().square();
      p *= cap;
    }
    lse.assign(rows.size(), -kInfinity);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      auto row = p.row(static_cast<Eigen::Index>(r));
      const KeyRange keys = problem.visible(rows[r]);
      auto seen = row.segment(keys.begin, keys.size());
      if (keys.size() == 0) {
        row.setZero();
        continue;
      }
      if (slope != 0) {
        const int64_t diagonal = rows[r] + problem.seqlen_k - problem.seqlen_q;
        for (Eigen::Index j = 0; j < seen.size(); ++j)
          seen[j] -= static_cast<Scalar>(slope) * static_cast<Scalar>(std::abs(diagonal - keys.begin - j));
      }
      const Scalar max = seen.maxCoeff();
      seen = (seen.array() - max).exp();
      Scalar sum = 0;
      for (Eigen::Index j = 0; j < seen.size(); ++j) sum += seen[j];
      seen /= sum;
      lse[r] = static_cast<double>(max + std::log(sum));
      row.head(keys.begin).setZero();
      row.tail(problem.seqlen_k - keys.end).setZero();
    }
  }
};

// What dropout multiplies P with: 0 or 1 / (1 - dropout). Empty where there is no dropout.
// `p` is sequence `b`.
inline Matrix dropout_factors(const Problem& p, int64_t b, int64_t h, const std::vector<int64_t>& rows) {
  if (p.dropout == 0) return {};
  const int dropped = shape_of(p).dropped;
  Matrix z(static_cast<Eigen::Index>(rows.size()), p.seqlen_k);
  for (Eigen::Index r = 0; r < z.rows(); ++r)
    for (Eigen::Index j = 0; j < z.cols(); ++j)
      z(r, j) = dropout_keeps(p.seed, b * p.heads + h, static_cast<int>(rows[static_cast<std::size_t>(r)]),
                              static_cast<int>(j), dropped)
                    ? 1 / (1 - p.dropout)
                    : 0;
  return z;
}

// P with dropout, as it is multiplied by V.
template <class M>
M with_dropout(const M& p, const Matrix& factors) {
  if (factors.size() == 0) return p;
  return p.cwiseProduct(factors.template cast<typename M::Scalar>());
}

// Standard deviation of what rounding to the element type leaves of a number of size 1.
inline double rounding_error(DType t) {
  const double last_bit = t == DType::bf16 ? 0x1p-7 : t == DType::fp16 ? 0x1p-10 : 0x1p-23;
  return last_bit / std::sqrt(12.0);
}

// Relative error of tanh. With 16-bit types kernels may use tanh.approx.f32: 2^-11 (PTX ISA, "tanh").
inline double tanh_error(DType t) { return t == DType::fp32 ? 4 * 0x1p-24 : 0x1p-11; }

// What a float32 sum of products may be off, for scores of queries up to |q| and keys up to |k|; and what tanh
// and ALiBi add to that.
inline double score_error(const Problem& p, double q_norm, double k_norm, double slope) {
  const double largest = std::abs(p.softmax_scale) * q_norm * k_norm;
  const double bias = slope * static_cast<double>(std::max(p.seqlen_q, p.seqlen_k));
  const double error = 4 * 0x1p-24 * (largest + bias);
  return p.softcap > 0 ? error + tanh_error(p.dtype) * std::min(largest, p.softcap) : error;
}

// The ALiBi slope of a query head, 0 where there is none.
inline double slope_of(const Problem& p, const HostTensors& inputs, int64_t h) {
  return p.alibi ? double{inputs.at("alibi").row(0, 0, 0)[h]} : 0;
}

// dS by the capped score, carried on to the score before the cap.
template <class M>
M through_cap(const M& ds, const Probabilities<M>& probabilities) {
  return probabilities.cap_slope.size() == 0 ? ds : M(ds.cwiseProduct(probabilities.cap_slope));
}

}  // namespace attn::detail
