// Reference implementations of the operations softmax and softmax_topk.
#include "host/operations.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "attn/parallel_for.h"
#include "check/reference_rows.h"

namespace attn {
namespace {

using namespace detail;
using RowD = Eigen::RowVectorXd;
using RowF = Eigen::RowVectorXf;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Softmax of one row in the precision of Scalar; all 0 if the row is all -inf.
template <class Row>
Row softmax(const Row& x) {
  const auto max = x.maxCoeff();
  if (std::isinf(max)) return Row::Zero(x.size());
  const Row e = (x.array() - max).exp();
  return e / e.sum();
}

Eigen::Map<const RowF> row_of(const HostTensor& t, const Expected::Row& at) {
  return {t.row(at.b, at.h, at.i), t.spec.columns()};
}

// Spec of a matrix with one row per (b, h, i): scores x, probabilities y.
TensorSpec rows_of(const Problem& p, std::string name, DType t, int64_t columns) {
  return {std::move(name), {p.batch, p.heads, p.seqlen_q, columns}, t};
}

// Calls body(index, row) for each row to compare, in parallel.
template <class Body>
void for_each_row(const std::vector<HeadRows>& pieces, Body body) {
  const std::vector<std::size_t> first = first_rows(pieces);
  parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t n) {
    const HeadRows& piece = pieces[static_cast<std::size_t>(n)];
    for (std::size_t r = 0; r < piece.rows.size(); ++r)
      body(first[static_cast<std::size_t>(n)] + r, Expected::Row{piece.b, piece.h, piece.rows[r]});
  });
}

std::vector<Expected> softmax_reference(const Problem& p, const HostTensors& inputs,
                                        Selection selection) {
  const HostTensor& x = inputs.at("x");
  const std::vector<HeadRows> pieces = select_rows(p, selection);
  // The bound on the largest error is for 16-bit types. For a few fp32 elements it would require
  // the last bit.
  Expected y = expected_rows(rows_of(p, "y", p.dtype, p.seqlen_k), first_rows(pieces).back(),
                             bounds_of(p.dtype).output, p.dtype != DType::fp32);
  for_each_row(pieces, [&](std::size_t at, const Expected::Row& where) {
    const RowF xf = row_of(x, where);
    const RowD exact = softmax<RowD>(xf.cast<double>());
    RowF low = softmax<RowF>(xf);
    for (float& v : low) v = round_to(p.dtype, v);
    store(y, at, where, exact, low, exact.cwiseAbs2(), 0);
  });
  return {std::move(y)};
}

std::vector<Expected> softmax_topk_reference(const Problem& p, const HostTensors& inputs,
                                             Selection selection) {
  const HostTensor& x = inputs.at("x");
  const std::vector<HeadRows> pieces = select_rows(p, selection);
  const double bound = bounds_of(p.dtype).output;
  // No bound on the largest error: a few values near 1 do not tell how precise a type is.
  const std::size_t count_of_rows = first_rows(pieces).back();
  Expected values =
      expected_rows(rows_of(p, "values", p.dtype, p.top_k), count_of_rows, bound, false);
  Expected indices =
      expected_rows(rows_of(p, "indices", DType::int32, p.top_k), count_of_rows, 0, false);
  for_each_row(pieces, [&](std::size_t at, const Expected::Row& where) {
    const RowF xf = row_of(x, where);
    const RowD exact = softmax<RowD>(xf.cast<double>());
    const auto count = static_cast<std::ptrdiff_t>(std::min(p.top_k, p.seqlen_k));
    std::vector<Eigen::Index> order(static_cast<std::size_t>(p.seqlen_k));
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(
        order.begin(), order.begin() + count, order.end(),
        [&](Eigen::Index a, Eigen::Index b) { return xf[a] > xf[b] || (xf[a] == xf[b] && a < b); });
    const RowF low_row = softmax<RowF>(xf);
    RowF low = RowF::Zero(p.top_k);
    RowD value = RowD::Zero(p.top_k);
    const auto first_index = indices.numbers.begin() + static_cast<std::ptrdiff_t>(at) * p.top_k;
    std::fill_n(first_index, p.top_k, -1);
    for (std::ptrdiff_t n = 0; n < count; ++n) {
      const Eigen::Index column = order[static_cast<std::size_t>(n)];
      if (double{xf[column]} == -kInfinity) break;  // sorted: only -inf follows
      value[n] = exact[column];
      low[n] = round_to(p.dtype, low_row[column]);
      first_index[n] = column;
    }
    store(values, at, where, value, low, value.cwiseAbs2(), 0);
    indices.rows[at] = where;
  });
  return {std::move(values), std::move(indices)};
}

std::vector<TensorSpec> scores(const Problem& p) { return {rows_of(p, "x", p.dtype, p.seqlen_k)}; }
std::vector<TensorSpec> no_tensors(const Problem&) { return {}; }
double no_flop(const Problem&) { return 0; }

}  // namespace

const Operation& softmax() {
  static const Operation operation{
      .name = "softmax",
      .inputs = scores,
      .saved = no_tensors,
      .outputs = [](const Problem& p) { return std::vector{rows_of(p, "y", p.dtype, p.seqlen_k)}; },
      .flop = no_flop,
      .reference = softmax_reference,
      .matrix = true,
  };
  return operation;
}

const Operation& softmax_topk() {
  static const Operation operation{
      .name = "softmax_topk",
      .inputs = scores,
      .saved = no_tensors,
      .outputs =
          [](const Problem& p) {
            return std::vector{rows_of(p, "values", p.dtype, p.top_k),
                               rows_of(p, "indices", DType::int32, p.top_k)};
          },
      .flop = no_flop,
      .reference = softmax_topk_reference,
      .matrix = true,
      .own = {{.name = "top_k",
               .lacking = "top-k",
               .help = "what softmax_topk keeps of a row (8)",
               .kind = Feature::Kind::number,
               .least = 1,
               .most = 0x1p62,
               .whole = true,
               .get =
                   [](const Problem& p) {
                     return p.top_k > 0 ? std::vector{static_cast<double>(p.top_k)}
                                        : std::vector<double>();
                   },
               .set =
                   [](Problem& p, const std::vector<double>& v) {
                     p.top_k = v.empty() ? 0 : static_cast<int64_t>(v[0]);
                   },
               .otherwise = 8,
               .everywhere = true}},
  };
  return operation;
}

}  // namespace attn
