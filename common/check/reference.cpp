#include "check/reference.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "attn/parallel_for.h"
#include "check/reference_rows.h"
#include "check/reference_scores.h"

namespace attn {
namespace detail {

// For gradients: P, dS and the result are rounded, each by up to half a unit in the last place
// (2^-8 in bf16, 2^-11 in fp16). That mostly adds up to 3e-3 and 4e-4. But keys with equal weights
// have equal rounding errors in P: a row of few terms reached 9e-3 (chapter 01, b2_cublas, which
// keeps P and dS in 16 bits). lse is always float32.
Bounds bounds_of(DType t) {
  switch (t) {
    case DType::fp32: return {2e-5, 2e-5, 1e-4};
    case DType::fp16: return {1e-3, 2e-5, 1.5e-3};
    case DType::bf16: return {6e-3, 2e-5, 1e-2};
    // Integer products are exact, and P has 16 bits.
    case DType::int8:
    case DType::int4: return {6e-3, 2e-5, 0};
    // P has 3 mantissa bits, a relative error of up to 2^-4. Where two keys have all the weight,
    // both errors may have the same sign.
    case DType::e4m3: return {0.1, 2e-5, 0};
    case DType::int32:
    case DType::int64:
    case DType::e5m2: break;
  }
  return {};  // not reached for a valid problem
}

// The other types have the exponent range of float32. Below 2^-126 a GPU may flush P to 0, an error
// of 100%; at 2^-112 the smallest of the bounds above, 1e-4, covers that.
double smallest_normal(DType t) { return t == DType::fp16 ? 0x1p-14 : 0x1p-112; }

int64_t longest_sequence(const Problem& p) {
  int64_t longest = p.batch - 1;
  if (!p.one_length() || p.mask)
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
    rows_a_head =
        std::min(p.seqlen_q, static_cast<int64_t>(rows / static_cast<double>(heads_taken)));
  }
  std::mt19937_64 random(p.seed);
  std::vector<HeadRows> pieces;
  // then random ones
  std::set<int64_t> chosen_heads{0, heads - 1, longest_sequence(p) * p.heads + p.heads - 1};
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
      for (; it != rows.end() && static_cast<int64_t>(piece.rows.size()) < kRowsPerPass; ++it)
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

}  // namespace detail

using namespace detail;

double subnormal_slack(const TensorSpec& spec) {
  return 0x1p-11 * smallest_normal(spec.dtype) * std::sqrt(static_cast<double>(spec.columns()));
}

Expected expected_rows(const TensorSpec& spec, std::size_t rows, double row_bound,
                       bool field_rule) {
  Expected e{spec, row_bound, field_rule, {}, {}, {}, {}, {}, {}};
  const auto columns = static_cast<std::size_t>(spec.columns());
  e.rows.resize(rows);
  if (is_index(spec.dtype)) {
    e.numbers.resize(rows * columns);
    return e;
  }
  for (std::vector<double>* a_row : {&e.scale, &e.slack, &e.given}) a_row->resize(rows);
  e.reference.resize(rows * columns);
  e.low.resize(rows * columns);
  return e;
}

std::vector<Expected> forward_reference(const Problem& batch, const HostTensors& inputs,
                                        Selection selection) {
  return attention_reference(batch, inputs, selection, {});
}

std::vector<Expected> attention_reference(const Problem& batch, const HostTensors& inputs,
                                          Selection selection, const std::vector<Feature>& own) {
  const HostTensor &q = inputs.at("q"), &k = inputs.at("k"), &v = inputs.at("v");
  const std::vector<HeadRows> pieces = select_rows(batch, selection);
  const std::vector<std::size_t> first = first_rows(pieces);
  const Bounds bounds = bounds_of(batch.dtype);
  TensorSpec like_o = like_q(batch, "o");
  like_o.shape[3] = v.spec.columns();  // may be narrower than Q in latent attention
  Expected o = expected_rows(like_o, first.back(), bounds.output, true);
  Expected lse = expected_rows(lse_of(batch), first.back(), bounds.lse, false);
  const Active features = active_features(batch, own);

  std::vector<double> largest(pieces.size());  // root of the squared terms of an element
  parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t n) {
    const HeadRows& piece = pieces[static_cast<std::size_t>(n)];
    const Problem p = batch.sequence(piece.b);
    const int64_t hkv = piece.h / p.group();
    const MatrixF kf = head_of(k, piece.b, hkv), vf = head_of(v, piece.b, hkv);
    const Matrix vd = in_double(v, piece.b, hkv, all_rows(v, piece.b), vf);
    const MatrixF qf = rows_of_head(q, piece.b, piece.h, piece.rows);

    const Scoring scoring{p, inputs, features, piece.h};
    const std::vector<int64_t> all_keys = all_rows(k, piece.b);
    const Matrix kd =
        changed(scoring, in_double(k, piece.b, hkv, all_keys, kf), all_keys, false);
    const Matrix qd = changed(scoring, in_double(q, piece.b, piece.h, piece.rows, qf), piece.rows,
                              true);
    const Matrix z = factors_of(scoring, piece.b, piece.rows);
    const Probabilities<Matrix> exact(scoring, qd, kd, piece.rows);
    const Matrix o_exact = with_dropout(exact.p, z) * vd;
    const bool small = p.dtype == DType::e4m3;
    // The type that P is rounded to where Q, K and V are integers.
    const DType p_type = bits_of(p.dtype) < 16 ? DType::bf16 : p.dtype;
    const Matrix squares =
        with_dropout(small ? coarse_small(exact.p) : coarse(p_type, exact.p), z).cwiseAbs2() *
        vd.cwiseAbs2();
    Probabilities<MatrixF> low(scoring, changed(scoring, qf, piece.rows, true),
                               changed(scoring, kf, all_keys, false), piece.rows);
    if (small)
      round_small(low.p);
    else
      round_all(p_type, low.p);
    MatrixF o_low = MatrixF::Zero(o_exact.rows(), o_exact.cols());
    multiply_in_order(with_dropout(low.p, z), vf, o_low);
    round_all(o.spec.dtype, o_low);

    if (small && squares.size() > 0)
      largest[static_cast<std::size_t>(n)] = std::sqrt(squares.maxCoeff());
    const double k_norm = largest_norm(kd);
    for (std::size_t r = 0; r < piece.rows.size(); ++r) {
      const Expected::Row where{piece.b, piece.h, piece.rows[r]};
      const auto i = static_cast<Eigen::Index>(r);
      const std::size_t at = first[static_cast<std::size_t>(n)] + r;
      const double error = score_error(scoring, qf.row(i).cast<double>().norm() * k_norm);
      store(o, at, where, o_exact.row(i), o_low.row(i), squares.row(i), error);
      lse.rows[at] = where;
      lse.reference[at] = exact.lse[r];
      lse.low[at] = static_cast<float>(low.lse[r]);
      lse.slack[at] = error;
      lse.scale[at] = std::max(1.0, std::isfinite(exact.lse[r]) ? std::abs(exact.lse[r]) : 0.0);
    }
  });
  // Rounding P to e4m3 (3 mantissa bits) changes a term by at most 1/16.
  for (const double x : largest)
    if (std::isfinite(x)) o.field_least = std::max(o.field_least, x / 16);
  return {std::move(o), std::move(lse)};
}

}  // namespace attn
