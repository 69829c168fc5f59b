#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <random>
#include <set>

#include "attn/parallel_for.h"
#include "check/reference.h"
#include "check/reference_scores.h"

namespace attn {
namespace {

using namespace detail;

// A K/V head with the query heads that share it.
struct KeyHead {
  int64_t b, hkv;
  Problem p;  // the head's sequence
  MatrixF kf, vf;
  Matrix kd, vd;
  double error;  // relative error of the scores
};

// The sums over query rows for the keys of a head.
struct KeySums {
  Matrix dk_exact, dv_exact, dk_squares, dv_squares;
  // squared errors of dK that the rounding of O and the approximate slopes cause
  Eigen::VectorXd dk_of_o, dk_of_slopes;
  MatrixF dk_low, dv_low;
  explicit KeySums(const Problem& p)
      : dk_exact(Matrix::Zero(p.seqlen_k, p.head_dim)),
        dv_exact(dk_exact),
        dk_squares(dk_exact),
        dv_squares(dk_exact),
        dk_of_o(Eigen::VectorXd::Zero(p.seqlen_k)),
        dk_of_slopes(dk_of_o),
        dk_low(MatrixF::Zero(p.seqlen_k, p.head_dim)),
        dv_low(dk_low) {}
  void operator+=(const KeySums& other) {
    dk_exact += other.dk_exact, dv_exact += other.dv_exact;
    dk_squares += other.dk_squares, dv_squares += other.dv_squares;
    dk_of_o += other.dk_of_o, dk_of_slopes += other.dk_of_slopes;
    dk_low += other.dk_low, dv_low += other.dv_low;
  }
};

class Backward {
 public:
  Backward(const Problem& batch, const HostTensors& inputs)
      : batch_(batch),
        inputs_(inputs),
        features_(active_features(batch)),
        q_(inputs.at("q")),
        do_(inputs.at("do")) {}

  KeyHead head(int64_t index) const {
    const int64_t b = index / batch_.kv_heads, hkv = index % batch_.kv_heads,
                  group = batch_.group();
    KeyHead head{b,
                 hkv,
                 batch_.sequence(b),
                 head_of(inputs_.at("k"), b, hkv),
                 head_of(inputs_.at("v"), b, hkv),
                 {},
                 {},
                 0};
    const HostTensor &k = inputs_.at("k"), &v = inputs_.at("v");
    head.kd = in_double(k, b, hkv, all_rows(k, b), head.kf);
    head.vd = in_double(v, b, hkv, all_rows(v, b), head.vf);
    const double k_norm = largest_norm(head.kd);
    for (int64_t h = hkv * group; h < (hkv + 1) * group; ++h)
      head.error = std::max(head.error, score_error({head.p, inputs_, features_, h},
                                                    largest_norm(head_of(q_, b, h)) * k_norm));
    return head;
  }

  // Adds `count` rows of query head `h`, starting at `first`, to `sums`, and stores their dQ
  // starting at row `at`.
  void add_rows(const KeyHead& head, int64_t h, int64_t first, int64_t count, KeySums& sums,
                Expected& dq, std::size_t at) const {
    const auto& [b, hkv, p, kf, vf, kd, vd, error] = head;
    const double scale = batch_.softmax_scale;
    std::vector<int64_t> rows(static_cast<std::size_t>(count));
    std::iota(rows.begin(), rows.end(), first);
    const MatrixF qf = rows_of_head(q_, b, h, rows), dof = rows_of_head(do_, b, h, rows);
    const Matrix qd = in_double(q_, b, h, rows, qf), dod = in_double(do_, b, h, rows, dof);

    const Scoring scoring{p, inputs_, features_, h};
    const Matrix z = factors_of(scoring, b, rows);
    const Probabilities<Matrix> exact(scoring, qd, kd, rows);
    const Matrix p_dropped = with_dropout(exact.p, z);
    const Matrix o = p_dropped * vd;
    const Eigen::VectorXd d = (dod.array() * o.array()).rowwise().sum();
    const Matrix dp = with_dropout(Matrix(dod * vd.transpose()), z);
    const Matrix ds =
        through_slopes(Matrix(exact.p.array() * (dp.colwise() - d).array() * scale), exact);
    // dP - D cancels where one key has all the weight; its terms do not.
    const Matrix p_coarse = coarse(p.dtype, exact.p);
    const Matrix ds_uncapped =
        p_coarse.array() * (dp.cwiseAbs().colwise() + d.cwiseAbs()).array() * std::abs(scale);
    const Matrix ds_terms = coarse(p.dtype, through_slopes(ds_uncapped, exact));
    const Matrix dq_exact = ds * kd, dq_squares = ds_terms.cwiseAbs2() * kd.cwiseAbs2();
    sums.dk_exact.noalias() += ds.transpose() * qd;
    sums.dk_squares.noalias() += ds_terms.cwiseAbs2().transpose() * qd.cwiseAbs2();
    sums.dv_exact.noalias() += p_dropped.transpose() * dod;
    sums.dv_squares.noalias() +=
        with_dropout(p_coarse, z).cwiseAbs2().transpose() * dod.cwiseAbs2();

    // O was rounded in the forward pass, and so was the P behind it. That shifts D by one random
    // error per row, and with it all dS of the row; where queries are equal, also all dS of a key.
    // `low` is one other sample of that rounding and says little about its size, so five standard
    // deviations, of the largest that the rounding may have, are always allowed: with normal errors
    // at most one row in 1.7 million has more. In addition, dP and D are float32 sums, and each of
    // them may cancel internally, not only against the other.
    const Eigen::VectorXd terms = ((dod.array() * o.array()).matrix().rowwise().squaredNorm() +
                                   (exact.p.array() * dp.array()).matrix().rowwise().squaredNorm())
                                      .cwiseSqrt();
    const Eigen::VectorXd d_error =
        std::abs(scale) * (5 * rounding_error(p.dtype) * terms +
                           4 * 0x1p-24 * dod.rowwise().norm().cwiseProduct(o.rowwise().norm()));
    const Matrix p_of_d = through_slopes(exact.p, exact);
    const Eigen::VectorXd dq_of_o = d_error.cwiseProduct((p_of_d * kd).rowwise().norm());
    sums.dk_of_o +=
        p_of_d.cwiseAbs2().transpose() * d_error.cwiseProduct(qd.rowwise().norm()).cwiseAbs2();
    Eigen::VectorXd dq_of_slopes = Eigen::VectorXd::Zero(count);
    if (const double slope_error = scoring.slope_error(); slope_error > 0) {
      const Matrix squares = slope_error * slope_error * ds_uncapped.cwiseAbs2();
      dq_of_slopes = (squares * kd.cwiseAbs2()).rowwise().sum().cwiseSqrt();
      sums.dk_of_slopes += (squares.transpose() * qd.cwiseAbs2()).rowwise().sum();
    }

    Probabilities<MatrixF> low(scoring, qf, kf, rows);
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
    ds_low = through_slopes(ds_low, low);
    round_all(p.dtype, ds_low);
    MatrixF dq_low = MatrixF::Zero(count, p.head_dim);
    multiply_in_order(ds_low, kf, dq_low);
    round_all(p.dtype, dq_low);
    multiply_in_order(ds_low.transpose(), qf, sums.dk_low);
    multiply_in_order(p_low.transpose(), dof, sums.dv_low);

    for (int64_t r = 0; r < count; ++r, ++at) {
      store(dq, at, {b, h, first + r}, dq_exact.row(r), dq_low.row(r), dq_squares.row(r), error);
      dq.given[at] = std::abs(dq_of_o[r]);
      dq.slack[at] += dq_of_slopes[r];
    }
  }

 private:
  const Problem& batch_;
  const HostTensors& inputs_;
  const Active features_;
  const HostTensor &q_, &do_;
};

}  // namespace

std::vector<Expected> backward_reference(const Problem& batch, const HostTensors& inputs,
                                         Selection selection) {
  const int64_t kv_heads = batch.batch * batch.kv_heads, group = batch.group();
  int64_t taken = kv_heads;
  if (!selection.full) {
    const double pairs = static_cast<double>(batch.seqlen_q) * static_cast<double>(batch.seqlen_k) *
                         static_cast<double>(group);
    taken = std::clamp<int64_t>(static_cast<int64_t>(selection.budget / pairs), 1, kv_heads);
  }
  // The last head exposes wrong strides; the others are random.
  std::set<int64_t> chosen{kv_heads - 1,
                           longest_sequence(batch) * batch.kv_heads + batch.kv_heads - 1};
  std::mt19937_64 random(batch.seed);
  while (static_cast<int64_t>(chosen.size()) < taken)
    chosen.insert(static_cast<int64_t>(random() % static_cast<uint64_t>(kv_heads)));
  const std::vector<int64_t> heads(chosen.begin(), chosen.end());

  const double bound = bounds_of(batch.dtype).gradient;
  std::vector<int64_t> first_q{0}, first_k{0};  // first row of each chosen head
  for (const int64_t head : heads) {
    const Problem p = batch.sequence(head / batch.kv_heads);
    first_q.push_back(first_q.back() + group * p.seqlen_q);
    first_k.push_back(first_k.back() + p.seqlen_k);
  }
  const auto q_rows = static_cast<std::size_t>(first_q.back()),
             k_rows = static_cast<std::size_t>(first_k.back());
  Expected dq = expected_rows(like_q(batch, "dq"), q_rows, bound, true);
  Expected dk = expected_rows(like_k(batch, "dk"), k_rows, bound, true);
  Expected dv = expected_rows(like_k(batch, "dv"), k_rows, bound, true);

  // With few heads, each head is split by rows so that all cores have work. The partial sums are
  // added in a fixed order, which does not depend on the machine.
  constexpr int64_t kPartsAtOnce = 16;
  const Backward backward(batch, inputs);
  const auto all_heads = static_cast<int64_t>(heads.size());
  for (int64_t first_head = 0; first_head < all_heads; first_head += kPartsAtOnce) {
    const int64_t some = std::min(kPartsAtOnce, all_heads - first_head);
    std::vector<std::optional<KeyHead>> head(static_cast<std::size_t>(some));
    parallel_for(some, [&](int64_t n) {
      head[static_cast<std::size_t>(n)] =
          backward.head(heads[static_cast<std::size_t>(first_head + n)]);
    });
    const int64_t parts = kPartsAtOnce / some;
    std::vector<std::optional<KeySums>> sums(static_cast<std::size_t>(some * parts));
    parallel_for(some * parts, [&](int64_t i) {
      const int64_t n = i / parts, part = i % parts;
      const KeyHead& own = *head[static_cast<std::size_t>(n)];
      const int64_t of_head = (own.p.seqlen_q + kRowsPerPass - 1) / kRowsPerPass,
                    pieces = of_head * group;
      const int64_t begin = pieces * part / parts, end = pieces * (part + 1) / parts;
      if (part > 0 && begin == end) return;
      KeySums& mine = sums[static_cast<std::size_t>(i)].emplace(own.p);
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t g = piece / of_head, first = piece % of_head * kRowsPerPass;
        const auto at =
            first_q[static_cast<std::size_t>(first_head + n)] + g * own.p.seqlen_q + first;
        backward.add_rows(own, own.hkv * group + g, first,
                          std::min(kRowsPerPass, own.p.seqlen_q - first), mine, dq,
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
        const auto at =
            static_cast<std::size_t>(first_k[static_cast<std::size_t>(first_head + n)] + j);
        store(dk, at, {b, hkv, j}, all.dk_exact.row(j), all.dk_low.row(j), all.dk_squares.row(j),
              error);
        dk.given[at] = std::sqrt(all.dk_of_o[j]);
        dk.slack[at] += std::sqrt(all.dk_of_slopes[j]);
        store(dv, at, {b, hkv, j}, all.dv_exact.row(j), all.dv_low.row(j), all.dv_squares.row(j),
              error);
      }
    });
  }
  return {std::move(dq), std::move(dk), std::move(dv)};
}

}  // namespace attn
