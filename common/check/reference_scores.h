/// \file
/// Shared by the forward and backward references: P of some queries, in double and in low
/// precision, and the errors that the types explain.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "attn/feature.h"
#include "check/reference_rows.h"

namespace attn::detail {

/// Rows computed at once.
constexpr int64_t kRowsPerPass = 64;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Some or all rows of a head, in any layout.
inline MatrixF rows_of_head(const HostTensor& t, int64_t b, int64_t h,
                            const std::vector<int64_t>& rows) {
  MatrixF m(static_cast<Eigen::Index>(rows.size()), t.spec.columns());
  for (Eigen::Index r = 0; r < m.rows(); ++r)
    m.row(r) = Eigen::Map<const Eigen::RowVectorXf>(t.row(b, h, rows[static_cast<std::size_t>(r)]),
                                                    m.cols());
  return m;
}
inline std::vector<int64_t> all_rows(const HostTensor& t, int64_t b) {
  std::vector<int64_t> rows(static_cast<std::size_t>(t.spec.rows_of(b)));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}
inline MatrixF head_of(const HostTensor& t, int64_t b, int64_t h) {
  return rows_of_head(t, b, h, all_rows(t, b));
}
// The same rows, `low`, in double; of a tensor that was given in double all 48 bits.
inline Matrix in_double(const HostTensor& t, int64_t b, int64_t h, const std::vector<int64_t>& rows,
                        const MatrixF& low) {
  Matrix m = low.cast<double>();
  if (t.rest.empty()) return m;
  for (Eigen::Index r = 0; r < m.rows(); ++r)
    m.row(r) += Eigen::Map<const Eigen::RowVectorXf>(
                    t.rest.data() + t.spec.row(b, h, rows[static_cast<std::size_t>(r)]) * m.cols(),
                    m.cols())
                    .cast<double>();
  return m;
}

// The largest norm of the rows of a head; 0 for a head without rows.
template <class M>
double largest_norm(const M& rows) {
  return rows.rows() == 0 ? 0 : rows.template cast<double>().rowwise().norm().maxCoeff();
}

// P for estimating rounding errors: a subnormal is as coarse as the smallest normal value.
template <class M>
M coarse(DType t, const M& p) {
  const double least = smallest_normal(t);
  return p.unaryExpr([least](double x) { return x > 0 && x < least ? least : x; });
}

// c += a b, summed in float32 term by term, as a thread would.
inline void multiply_in_order(const MatrixF& a, const MatrixF& b, MatrixF& c) {
  for (Eigen::Index k = 0; k < a.cols(); ++k) c.noalias() += a.col(k) * b.row(k);
}

inline void round_all(DType t, MatrixF& m) {
  for (Eigen::Index i = 0; i < m.size(); ++i) m.data()[i] = round_to(t, m.data()[i]);
}

// For e4m3, whose smallest normal number is 2^-6: P as a kernel has it, relative to the row's
// maximum, in 0 to 1, and for estimating its rounding errors.
inline void round_small(MatrixF& p) {
  if (p.cols() == 0) return;  // an empty sequence
  for (Eigen::Index r = 0; r < p.rows(); ++r) {
    const float max = p.row(r).maxCoeff();
    if (max > 0)
      p.row(r) =
          p.row(r).unaryExpr([max](float x) { return round_to(DType::e4m3, x / max) * max; });
  }
}
inline Matrix coarse_small(Matrix p) {
  if (p.cols() == 0) return p;
  for (Eigen::Index r = 0; r < p.rows(); ++r) {
    const double least = 0x1p-6 * p.row(r).maxCoeff();
    p.row(r) = p.row(r).unaryExpr([least](double x) { return x > 0 && x < least ? least : x; });
  }
  return p;
}

// The features of a problem.
using Active = std::vector<const Feature*>;
inline Active active_features(const Problem& p, const std::vector<Feature>& own = {}) {
  Active all;
  for (const auto* features : {&shared_features(), &own})
    for (const Feature& f : *features)
      if (!f.values(p).empty()) all.push_back(&f);
  return all;
}

// How the scores of a query head are computed.
struct Scoring {
  const Problem& p;  // the head's sequence
  const HostTensors& inputs;
  const Active& features;
  int64_t h;

  // Relative error of the slopes through which a gradient is propagated; 0: the slopes are 1.
  double slope_error() const {
    double error = 0;
    for (const Feature* f : features)
      if (f->slope_error) error += f->slope_error(p);
    return error;
  }
};

// Rows of Q or K as they enter the product.
template <class M>
M changed(const Scoring& s, M m, const std::vector<int64_t>& rows, bool of_q) {
  using Scalar = typename M::Scalar;
  for (const Feature* f : s.features)
    for (Eigen::Index r = 0; r < m.rows(); ++r) {
      const InputRow<Scalar> row{s.p,
                                 s.inputs,
                                 of_q,
                                 rows[static_cast<std::size_t>(r)],
                                 {&m(r, 0), static_cast<std::size_t>(m.cols())}};
      if constexpr (std::is_same_v<Scalar, float>) {
        if (f->rows_low) f->rows_low(row);
      } else {
        if (f->rows) f->rows(row);
      }
    }
  return m;
}

// Scores, probabilities and lse of some queries of one head: [rows, seqlen_k].
template <class M>
struct Probabilities {
  M p;                      // normalised; 0 where masked
  M slopes;  // derivatives of scores by scaled products; empty: all 1
  std::vector<double> lse;  // -inf for a fully masked row
  template <class Q, class K>
  Probabilities(const Scoring& s, const Q& q, const K& k, const std::vector<int64_t>& rows) {
    using Scalar = typename M::Scalar;
    if constexpr (std::is_same_v<Scalar, float>) {
      p = M::Zero(q.rows(), k.rows());
      multiply_in_order(q, k.transpose(), p);
    } else {
      p.noalias() = q * k.transpose();
    }
    p *= static_cast<Scalar>(s.p.softmax_scale);
    if (s.slope_error() > 0) slopes = M::Ones(p.rows(), p.cols());
    lse.assign(rows.size(), -kInfinity);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto at = static_cast<Eigen::Index>(r);
      std::vector<KeyRange> runs;
      s.p.for_each_range(s.h, rows[r], [&](KeyRange run) { runs.push_back(run); });
      const auto span_of = [at](M& m, KeyRange run) {
        return m.size() == 0
                   ? std::span<Scalar>()
                   : std::span<Scalar>(&m(at, run.begin), static_cast<std::size_t>(run.size()));
      };
      Scalar max = -std::numeric_limits<Scalar>::infinity(), sum = 0;
      for (const KeyRange& run : runs) {
        const ScoreRow<Scalar> row{
            s.p, s.inputs, s.h, rows[r], run.begin, span_of(p, run), span_of(slopes, run)};
        for (const Feature* f : s.features) {
          if constexpr (std::is_same_v<Scalar, float>) {
            if (f->scores_low) f->scores_low(row);
          } else {
            if (f->scores) f->scores(row);
          }
        }
        max = std::max(max, p.row(at).segment(run.begin, run.size()).maxCoeff());
      }
      int64_t hidden = 0;  // keys before this one are processed
      for (const KeyRange& run : runs) {
        p.row(at).segment(hidden, run.begin - hidden).setZero();
        auto seen = p.row(at).segment(run.begin, run.size());
        seen = (seen.array() - max).exp();
        for (Eigen::Index j = 0; j < seen.size(); ++j) sum += seen[j];
        hidden = run.end;
      }
      p.row(at).tail(s.p.seqlen_k - hidden).setZero();
      if (runs.empty()) continue;
      p.row(at) /= sum;
      lse[r] = static_cast<double>(max + std::log(sum));
    }
  }
};

// The factors that dropout applies to P before P V: 0 or 1 / (1 - dropout). Empty without dropout.
inline Matrix factors_of(const Scoring& s, int64_t b, const std::vector<int64_t>& rows) {
  Matrix z;
  for (const Feature* f : s.features) {
    if (!f->factors) continue;
    if (z.size() == 0) z = Matrix::Ones(static_cast<Eigen::Index>(rows.size()), s.p.seqlen_k);
    for (Eigen::Index r = 0; r < z.rows(); ++r)
      f->factors(s.p, b, s.h, rows[static_cast<std::size_t>(r)],
                 {&z(r, 0), static_cast<std::size_t>(z.cols())});
  }
  return z;
}

// P after dropout, as multiplied by V.
template <class M>
M with_dropout(const M& p, const Matrix& factors) {
  if (factors.size() == 0) return p;
  return p.cwiseProduct(factors.template cast<typename M::Scalar>());
}

// Standard deviation of the error of rounding a number of size 1 to the element type.
inline double rounding_error(DType t) {
  const double last_bit = t == DType::bf16 ? 0x1p-7 : t == DType::fp16 ? 0x1p-10 : 0x1p-23;
  return last_bit / std::sqrt(12.0);
}

// The error of a float32 sum of products, for a query and a key whose norms have the product
// `norms`, plus the error that the features add.
inline double score_error(const Scoring& s, double norms) {
  const double largest = std::abs(s.p.softmax_scale) * norms;
  // wgmma on e4m3 truncates each product to 13 fraction bits of the sum. If all products have one
  // sign, as with a needle, these errors add up: to an eighth of what d products could lose, since
  // the sum grows.
  double error = 4 * 0x1p-24 * largest;
  if (s.p.dtype == DType::e4m3) error = static_cast<double>(s.p.head_dim) / 8 * 0x1p-13 * largest;
  for (const Feature* f : s.features)
    if (f->error) error += f->error(s.p, s.inputs, s.h, largest);
  return error;
}

// dS with respect to the scores, propagated to the scaled products.
template <class M>
M through_slopes(const M& ds, const Probabilities<M>& probabilities) {
  return probabilities.slopes.size() == 0 ? ds : M(ds.cwiseProduct(probabilities.slopes));
}

}  // namespace attn::detail
