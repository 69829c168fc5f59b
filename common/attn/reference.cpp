#include "attn/reference.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <set>

#include "attn/parallel_for.h"
#include "attn/philox.h"
#include "attn/reference_rows.h"

namespace attn {
namespace detail {

constexpr int64_t kRowsAtOnce = 64;

Bounds bounds_of(DType t) {
  switch (t) {
    case DType::fp32: return {2e-5, 2e-5, 1e-4};
    case DType::fp16: return {1e-3, 1e-4, 4e-3};
    case DType::bf16: return {6e-3, 1e-4, 2e-2};
    case DType::int32: return {};
  }
  return {};
}

// The other types have float32's exponents: below 2^-126 a GPU may flush P to 0, an error of all of it, which the
// least of the bounds above, 1e-4, allows of 2^-112.
double smallest_normal(DType t) { return t == DType::fp16 ? 0x1p-14 : 0x1p-112; }

int64_t longest_sequence(const Problem& p) {
  int64_t longest = p.batch - 1;
  if (p.varlen())
    for (int64_t b = p.batch - 1; b >= 0; --b)
      if (p.sequence(b).visible_pairs() > p.sequence(longest).visible_pairs()) longest = b;
  return longest;
}

std::vector<HeadRows> select_rows(const Problem& p, Selection selection) {
  const int64_t heads = p.batch * p.heads;
  int64_t heads_taken = heads, rows_a_head = p.seqlen_q;
  if (!selection.full) {
    const double rows = std::max(48.0, selection.budget / static_cast<double>(p.seqlen_k));
    heads_taken = std::clamp<int64_t>(static_cast<int64_t>(rows / 48), 1, heads);
    rows_a_head = std::min(p.seqlen_q, static_cast<int64_t>(rows / static_cast<double>(heads_taken)));
  }
  std::mt19937_64 random(p.seed);
  std::vector<HeadRows> pieces;
  std::set<int64_t> chosen_heads{0, heads - 1, longest_sequence(p) * p.heads + p.heads - 1};  // then random ones
  while (static_cast<int64_t>(chosen_heads.size()) < std::min(heads, heads_taken))
    chosen_heads.insert(static_cast<int64_t>(random() % static_cast<uint64_t>(heads)));
  for (const int64_t bh : chosen_heads) {
    std::set<int64_t> rows;
    const int64_t seqlen_q = p.sequence(bh / p.heads).seqlen_q;
    if (rows_a_head >= seqlen_q) {
      for (int64_t i = 0; i < seqlen_q; ++i) rows.insert(i);
    } else {
      for (const int64_t tile : {16, 32, 64, 128})
        for (const int64_t edge : {int64_t{0}, tile, (seqlen_q - 1) / tile * tile})
          for (const int64_t i : {edge - 1, edge})
            if (i >= 0 && i < seqlen_q) rows.insert(i);
      rows.insert(seqlen_q - 1);
      while (static_cast<int64_t>(rows.size()) < rows_a_head)
        rows.insert(static_cast<int64_t>(random() % static_cast<uint64_t>(seqlen_q)));
    }
    for (auto it = rows.begin(); it != rows.end();) {
      HeadRows piece{bh / p.heads, bh % p.heads, {}};
      for (; it != rows.end() && static_cast<int64_t>(piece.rows.size()) < kRowsAtOnce; ++it)
        piece.rows.push_back(*it);
      pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

std::vector<std::size_t> first_rows(const std::vector<HeadRows>& pieces) {
  std::vector<std::size_t> first(pieces.size() + 1, 0);
  for (std::size_t n = 0; n < pieces.size(); ++n) first[n + 1] = first[n] + pieces[n].rows.size();
  return first;
}

void reserve(Expected& e, std::size_t rows) {
  const auto columns = static_cast<std::size_t>(e.spec.columns());
  e.rows.resize(rows);
  e.scale.resize(rows);
  e.slack.resize(rows);
  e.given.assign(rows, 0);
  e.reference.resize(rows * columns);
  e.low.resize(rows * columns);
}

}  // namespace detail
namespace {

using namespace detail;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The rows of one head, of which those of the other heads lie in between if the tensor is packed.
Eigen::Map<const MatrixF, 0, Eigen::OuterStride<>> head_of(const HostTensor& t, int64_t b, int64_t h) {
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
void multiply_in_order(const MatrixF& a, const MatrixF& b, MatrixF& c) {
  for (Eigen::Index k = 0; k < a.cols(); ++k) c.noalias() += a.col(k) * b.row(k);
}

void round_all(DType t, MatrixF& m) {
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
Matrix dropout_factors(const Problem& p, int64_t b, int64_t h, const std::vector<int64_t>& rows) {
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
double rounding_error(DType t) {
  const double last_bit = t == DType::bf16 ? 0x1p-7 : t == DType::fp16 ? 0x1p-10 : 0x1p-23;
  return last_bit / std::sqrt(12.0);
}

// Relative error of tanh. With 16-bit types kernels may use tanh.approx.f32: 2^-11 (PTX ISA, "tanh").
double tanh_error(DType t) { return t == DType::fp32 ? 4 * 0x1p-24 : 0x1p-11; }

// What a float32 sum of products may be off, for scores of queries up to |q| and keys up to |k|; and what tanh
// and ALiBi add to that.
double score_error(const Problem& p, double q_norm, double k_norm, double slope) {
  const double largest = std::abs(p.softmax_scale) * q_norm * k_norm;
  const double bias = slope * static_cast<double>(std::max(p.seqlen_q, p.seqlen_k));
  const double error = 4 * 0x1p-24 * (largest + bias);
  return p.softcap > 0 ? error + tanh_error(p.dtype) * std::min(largest, p.softcap) : error;
}

// The ALiBi slope of a query head, 0 where there is none.
double slope_of(const Problem& p, const HostTensors& inputs, int64_t h) {
  return p.alibi ? double{inputs.at("alibi").row(0, 0, 0)[h]} : 0;
}

// dS by the capped score, carried on to the score before the cap.
template <class M>
M through_cap(const M& ds, const Probabilities<M>& probabilities) {
  return probabilities.cap_slope.size() == 0 ? ds : M(ds.cwiseProduct(probabilities.cap_slope));
}

// A key head with the query heads that share it.
struct KeyHead {
  int64_t b, hkv;
  Problem p;  // its sequence
  MatrixF kf, vf;
  Matrix kd, vd;
  double error;  // relative, of scores
};

// What rows of queries add up for the keys of a head.
struct KeySums {
  Matrix dk_exact, dv_exact, dk_squares, dv_squares;
  Eigen::VectorXd dk_of_o, dk_of_tanh;  // squares of what a rounded O and an approximate tanh do to dK
  MatrixF dk_low, dv_low;
  explicit KeySums(const Problem& p)
      : dk_exact(Matrix::Zero(p.seqlen_k, p.head_dim)),
        dv_exact(dk_exact),
        dk_squares(dk_exact),
        dv_squares(dk_exact),
        dk_of_o(Eigen::VectorXd::Zero(p.seqlen_k)),
        dk_of_tanh(dk_of_o),
        dk_low(MatrixF::Zero(p.seqlen_k, p.head_dim)),
        dv_low(dk_low) {}
  void operator+=(const KeySums& other) {
    dk_exact += other.dk_exact, dv_exact += other.dv_exact;
    dk_squares += other.dk_squares, dv_squares += other.dv_squares;
    dk_of_o += other.dk_of_o, dk_of_tanh += other.dk_of_tanh;
    dk_low += other.dk_low, dv_low += other.dv_low;
  }
};

class Backward {
 public:
  Backward(const Problem& batch, const HostTensors& inputs)
      : batch_(batch), inputs_(inputs), q_(inputs.at("q")), do_(inputs.at("do")) {}

  KeyHead head(int64_t index) const {
    const int64_t b = index / batch_.kv_heads, hkv = index % batch_.kv_heads, group = batch_.group();
    KeyHead head{b, hkv, batch_.sequence(b), head_of(inputs_.at("k"), b, hkv), head_of(inputs_.at("v"), b, hkv),
                 {}, {}, 0};
    head.kd = head.kf.cast<double>(), head.vd = head.vf.cast<double>();
    double q_norm = 0, steepest = 0;
    for (int64_t h = hkv * group; h < (hkv + 1) * group; ++h) {
      q_norm = std::max(q_norm, largest_norm(head_of(q_, b, h)));
      steepest = std::max(steepest, slope_of(head.p, inputs_, h));
    }
    head.error = score_error(head.p, q_norm, largest_norm(head.kd), steepest);
    return head;
  }

  // Adds `count` rows from `first` on of query head `h` to `sums`, and stores dQ of them from row `at` on.
  void add_rows(const KeyHead& head, int64_t h, int64_t first, int64_t count, KeySums& sums, Expected& dq,
                std::size_t at) const {
    const auto& [b, hkv, p, kf, vf, kd, vd, error] = head;
    const double scale = batch_.softmax_scale;
    std::vector<int64_t> rows(static_cast<std::size_t>(count));
    std::iota(rows.begin(), rows.end(), first);
    const MatrixF qf = head_of(q_, b, h).middleRows(first, count);
    const MatrixF dof = head_of(do_, b, h).middleRows(first, count);
    const Matrix qd = qf.cast<double>(), dod = dof.cast<double>();

    const Matrix z = dropout_factors(p, b, h, rows);
    const double slope = slope_of(p, inputs_, h);
    const Probabilities<Matrix> exact(p, qd, kd, rows, slope);
    const Matrix p_dropped = with_dropout(exact.p, z);
    const Matrix o = p_dropped * vd;
    const Eigen::VectorXd d = (dod.array() * o.array()).rowwise().sum();
    const Matrix dp = with_dropout(Matrix(dod * vd.transpose()), z);
    const Matrix ds = through_cap(Matrix(exact.p.array() * (dp.colwise() - d).array() * scale), exact);
    // dP - D cancels where one key has all the weight; its terms do not.
    const Matrix p_coarse = coarse(p.dtype, exact.p);
    const Matrix ds_uncapped = p_coarse.array() * (dp.cwiseAbs().colwise() + d.cwiseAbs()).array() * std::abs(scale);
    const Matrix ds_terms = coarse(p.dtype, through_cap(ds_uncapped, exact));
    const Matrix dq_exact = ds * kd, dq_squares = ds_terms.cwiseAbs2() * kd.cwiseAbs2();
    sums.dk_exact.noalias() += ds.transpose() * qd;
    sums.dk_squares.noalias() += ds_terms.cwiseAbs2().transpose() * qd.cwiseAbs2();
    sums.dv_exact.noalias() += p_dropped.transpose() * dod;
    sums.dv_squares.noalias() += with_dropout(p_coarse, z).cwiseAbs2().transpose() * dod.cwiseAbs2();

    // O comes rounded from the forward pass, which moves D by one random number a row. All its dS, and
    // where queries are alike even all of a key's, move together: a second rounding, that of `low`, says
    // little about the first. So three standard deviations of it are allowed in any case.
    // dP and D are sums in float32 besides, which may cancel each by itself and not only one another.
    const Eigen::VectorXd d_error =
        std::abs(scale) * (3 * rounding_error(p.dtype) * (dod.array() * o.array()).matrix().rowwise().norm() +
                           4 * 0x1p-24 * dod.rowwise().norm().cwiseProduct(o.rowwise().norm()));
    const Matrix p_of_d = through_cap(exact.p, exact);
    const Eigen::VectorXd dq_of_o = d_error.cwiseProduct((p_of_d * kd).rowwise().norm());
    sums.dk_of_o += p_of_d.cwiseAbs2().transpose() * d_error.cwiseProduct(qd.rowwise().norm()).cwiseAbs2();
    // 1 - tanh^2 is off by twice the error of tanh and a little more, which is much of it where the cap holds.
    Eigen::VectorXd dq_of_tanh = Eigen::VectorXd::Zero(count);
    if (p.softcap > 0) {
      const Matrix squares = 9 * tanh_error(p.dtype) * tanh_error(p.dtype) * ds_uncapped.cwiseAbs2();
      dq_of_tanh = (squares * kd.cwiseAbs2()).rowwise().sum().cwiseSqrt();
      sums.dk_of_tanh += (squares.transpose() * qd.cwiseAbs2()).rowwise().sum();
    }

    Probabilities<MatrixF> low(p, qf, kf, rows, slope);
    MatrixF p_low = low.p;
    round_all(p.dtype, p_low);
    p_low = with_dropout(p_low, z);
    MatrixF o_low = MatrixF::Zero(count, p.head_dim);
    multiply_in_order(p_low, vf, o_low);
    round_all(p.dtype, o_low);
    const Eigen::VectorXf d_low = (dof.array() * o_low.array()).rowwise().sum();
    MatrixF ds_low = MatrixF::Zero(count, p.seqlen_k);
    multiply_in_order(dof, vf.transpose(), ds_low);
    ds_low = with_dropout(ds_low, z);
    ds_low = low.p.array() * (ds_low.colwise() - d_low).array() * static_cast<float>(scale);
    ds_low = through_cap(ds_low, low);
    round_all(p.dtype, ds_low);
    MatrixF dq_low = MatrixF::Zero(count, p.head_dim);
    multiply_in_order(ds_low, kf, dq_low);
    round_all(p.dtype, dq_low);
    multiply_in_order(ds_low.transpose(), qf, sums.dk_low);
    multiply_in_order(p_low.transpose(), dof, sums.dv_low);

    for (int64_t r = 0; r < count; ++r, ++at) {
      store(dq, at, {b, h, first + r}, dq_exact.row(r), dq_low.row(r), dq_squares.row(r), error);
      dq.given[at] = std::abs(dq_of_o[r]);
      dq.slack[at] += dq_of_tanh[r];
    }
  }

 private:
  const Problem& batch_;
  const HostTensors& inputs_;
  const HostTensor &q_, &do_;
};

}  // namespace

std::vector<Expected> forward_reference(const Problem& batch, const HostTensors& inputs,
                                        Selection selection) {
  const HostTensor &q = inputs.at("q"), &k = inputs.at("k"), &v = inputs.at("v");
  const std::vector<HeadRows> pieces = select_rows(batch, selection);
  const std::vector<std::size_t> first = first_rows(pieces);
  const Bounds bounds = bounds_of(batch.dtype);
  Expected o{like_q(batch, "o"), bounds.output, true, {}, {}, {}, {}, {}, {}};
  Expected lse{lse_of(batch), bounds.lse, false, {}, {}, {}, {}, {}, {}};
  reserve(o, first.back());
  reserve(lse, first.back());

  parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t n) {
    const HeadRows& piece = pieces[static_cast<std::size_t>(n)];
    const Problem p = batch.sequence(piece.b);
    const int64_t hkv = piece.h / p.group();
    const MatrixF kf = head_of(k, piece.b, hkv), vf = head_of(v, piece.b, hkv);
    const Matrix kd = kf.cast<double>(), vd = vf.cast<double>();
    MatrixF qf(static_cast<Eigen::Index>(piece.rows.size()), p.head_dim);
    const auto q_head = head_of(q, piece.b, piece.h);
    for (std::size_t r = 0; r < piece.rows.size(); ++r)
      qf.row(static_cast<Eigen::Index>(r)) = q_head.row(piece.rows[r]);

    const Matrix z = dropout_factors(p, piece.b, piece.h, piece.rows);
    const double slope = slope_of(p, inputs, piece.h);
    const Probabilities<Matrix> exact(p, qf.cast<double>(), kd, piece.rows, slope);
    const Matrix o_exact = with_dropout(exact.p, z) * vd;
    const Matrix squares =
        with_dropout(coarse(p.dtype, exact.p), z).cwiseAbs2() * vd.cwiseAbs2();
    Probabilities<MatrixF> low(p, qf, kf, piece.rows, slope);
    round_all(p.dtype, low.p);
    MatrixF o_low = MatrixF::Zero(o_exact.rows(), o_exact.cols());
    multiply_in_order(with_dropout(low.p, z), vf, o_low);
    round_all(p.dtype, o_low);

    const double k_norm = largest_norm(kd);
    for (std::size_t r = 0; r < piece.rows.size(); ++r) {
      const Expected::Row where{piece.b, piece.h, piece.rows[r]};
      const auto i = static_cast<Eigen::Index>(r);
      const std::size_t at = first[static_cast<std::size_t>(n)] + r;
      const double error = score_error(p, qf.row(i).cast<double>().norm(), k_norm, slope);
      store(o, at, where, o_exact.row(i), o_low.row(i), squares.row(i), error);
      lse.rows[at] = where;
      lse.reference[at] = exact.lse[r];
      lse.low[at] = static_cast<float>(low.lse[r]);
      lse.slack[at] = error;
      lse.scale[at] = std::max(1.0, std::isfinite(exact.lse[r]) ? std::abs(exact.lse[r]) : 0.0);
    }
  });
  return {std::move(o), std::move(lse)};
}

std::vector<Expected> backward_reference(const Problem& batch, const HostTensors& inputs,
                                         Selection selection) {
  const int64_t kv_heads = batch.batch * batch.kv_heads, group = batch.group();
  int64_t taken = kv_heads;
  if (!selection.full) {
    const double pairs = static_cast<double>(batch.seqlen_q) * static_cast<double>(batch.seqlen_k) *
                         static_cast<double>(group);
    taken = std::clamp<int64_t>(static_cast<int64_t>(selection.budget / pairs), 1, kv_heads);
  }
  // The last head finds wrong strides; then random ones.
  std::set<int64_t> chosen{kv_heads - 1, longest_sequence(batch) * batch.kv_heads + batch.kv_heads - 1};
  std::mt19937_64 random(batch.seed);
  while (static_cast<int64_t>(chosen.size()) < taken)
    chosen.insert(static_cast<int64_t>(random() % static_cast<uint64_t>(kv_heads)));
  const std::vector<int64_t> heads(chosen.begin(), chosen.end());

  const double bound = bounds_of(batch.dtype).gradient;
  Expected dq{like_q(batch, "dq"), bound, true, {}, {}, {}, {}, {}, {}};
  Expected dk{like_k(batch, "dk"), bound, true, {}, {}, {}, {}, {}, {}};
  Expected dv{like_k(batch, "dv"), bound, true, {}, {}, {}, {}, {}, {}};
  std::vector<int64_t> first_q{0}, first_k{0};  // where the rows of each chosen head begin
  for (const int64_t head : heads) {
    const Problem p = batch.sequence(head / batch.kv_heads);
    first_q.push_back(first_q.back() + group * p.seqlen_q);
    first_k.push_back(first_k.back() + p.seqlen_k);
  }
  reserve(dq, static_cast<std::size_t>(first_q.back()));
  reserve(dk, static_cast<std::size_t>(first_k.back()));
  reserve(dv, static_cast<std::size_t>(first_k.back()));

  // Few heads are shared out among cores by rows: each part of a head adds up some of them, and then the sums are
  // added, in an order that does not depend on the machine.
  constexpr int64_t kPartsAtOnce = 16;
  const Backward backward(batch, inputs);
  const auto all_heads = static_cast<int64_t>(heads.size());
  for (int64_t first_head = 0; first_head < all_heads; first_head += kPartsAtOnce) {
    const int64_t some = std::min(kPartsAtOnce, all_heads - first_head);
    std::vector<std::optional<KeyHead>> head(static_cast<std::size_t>(some));
    parallel_for(some, [&](int64_t n) {
      head[static_cast<std::size_t>(n)] = backward.head(heads[static_cast<std::size_t>(first_head + n)]);
    });
    const int64_t parts = kPartsAtOnce / some;
    std::vector<std::optional<KeySums>> sums(static_cast<std::size_t>(some * parts));
    parallel_for(some * parts, [&](int64_t i) {
      const int64_t n = i / parts, part = i % parts;
      const KeyHead& own = *head[static_cast<std::size_t>(n)];
      const int64_t of_head = (own.p.seqlen_q + kRowsAtOnce - 1) / kRowsAtOnce, pieces = of_head * group;
      const int64_t begin = pieces * part / parts, end = pieces * (part + 1) / parts;
      if (part > 0 && begin == end) return;
      KeySums& mine = sums[static_cast<std::size_t>(i)].emplace(own.p);
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t g = piece / of_head, first = piece % of_head * kRowsAtOnce;
        const auto at = first_q[static_cast<std::size_t>(first_head + n)] + g * own.p.seqlen_q + first;
        backward.add_rows(own, own.hkv * group + g, first, std::min(kRowsAtOnce, own.p.seqlen_q - first), mine, dq,
                          static_cast<std::size_t>(at));
      }
    });
    parallel_for(some, [&](int64_t n) {
      const auto& [b, hkv, p, kf, vf, kd, vd, error] = *head[static_cast<std::size_t>(n)];
      KeySums& all = *sums[static_cast<std::size_t>(n * parts)];
      for (int64_t part = 1; part < parts; ++part)
        if (const auto& other = sums[static_cast<std::size_t>(n * parts + part)]) all += *other;
      round_all(p.dtype, all.dk_low);
      round_all(p.dtype, all.dv_low);
      for (int64_t j = 0; j < p.seqlen_k; ++j) {
        const auto at = static_cast<std::size_t>(first_k[static_cast<std::size_t>(first_head + n)] + j);
        store(dk, at, {b, hkv, j}, all.dk_exact.row(j), all.dk_low.row(j), all.dk_squares.row(j), error);
        dk.given[at] = std::sqrt(all.dk_of_o[j]);
        dk.slack[at] += std::sqrt(all.dk_of_tanh[j]);
        store(dv, at, {b, hkv, j}, all.dv_exact.row(j), all.dv_low.row(j), all.dv_squares.row(j), error);
      }
    });
  }
  return {std::move(dq), std::move(dk), std::move(dv)};
}

}  // namespace attn
