#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "attn/parallel_for.h"
#include "attn/reference_rows.h"

namespace attn {
namespace {

using namespace detail;
using RowD = Eigen::RowVectorXd;
using RowF = Eigen::RowVectorXf;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Softmax of one row in the precision of Scalar; 0 where the row is -inf alone.
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

TensorSpec rows_of(const Problem& p, std::string name, DType t, int64_t columns) {
  return {std::move(name), {p.batch, p.heads, p.seqlen_q, columns}, t};
}

// Calls body(number, place) for each row to compare, on all cores.
template <class Body>
void for_each_row(const std::vector<HeadRows>& pieces, Body body) {
  const std::vector<std::size_t> first = first_rows(pieces);
  parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t n) {
    const HeadRows& piece = pieces[static_cast<std::size_t>(n)];
    for (std::size_t r = 0; r < piece.rows.size(); ++r)
      body(first[static_cast<std::size_t>(n)] + r, Expected::Row{piece.b, piece.h, piece.rows[r]});
  });
}

}  // namespace

std::vector<Expected> softmax_reference(const Problem& p, const HostTensors& inputs,
                                        Selection selection) {
  const HostTensor& x = inputs.at("x");
  const std::vector<HeadRows> pieces = select_rows(p, selection);
  // The rule of the largest error is one of 16-bit types: for a few float32 numbers it asks for the last bit.
  Expected y{rows_of(p, "y", p.dtype, p.seqlen_k), bounds_of(p.dtype).output, p.dtype != DType::fp32, {}, {}, {}, {}, {}, {}};
  reserve(y, first_rows(pieces).back());
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
  // No rule of the largest error: a handful of numbers near 1 says nothing about what a type costs.
  Expected values{rows_of(p, "values", p.dtype, p.top_k), bound, false, {}, {}, {}, {}, {}, {}};
  // Indices are right or wrong: a bound of 0.
  Expected indices{rows_of(p, "indices", DType::int32, p.top_k), 0, false, {}, {}, {}, {}, {}, {}};
  reserve(values, first_rows(pieces).back());
  reserve(indices, first_rows(pieces).back());
  for_each_row(pieces, [&](std::size_t at, const Expected::Row& where) {
    const RowF xf = row_of(x, where);
    const RowD exact = softmax<RowD>(xf.cast<double>());
    const auto count = static_cast<std::ptrdiff_t>(std::min(p.top_k, p.seqlen_k));
    std::vector<Eigen::Index> order(static_cast<std::size_t>(p.seqlen_k));
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(),
                      [&](Eigen::Index a, Eigen::Index b) {
                        return xf[a] > xf[b] || (xf[a] == xf[b] && a < b);
                      });
    const RowF low_row = softmax<RowF>(xf);
    RowF low = RowF::Zero(p.top_k);
    RowD value = RowD::Zero(p.top_k), index = RowD::Constant(p.top_k, -1);
    for (std::ptrdiff_t n = 0; n < count; ++n) {
      const Eigen::Index column = order[static_cast<std::size_t>(n)];
      if (double{xf[column]} == -kInfinity) break;  // sorted: nothing but -inf follows
      value[n] = exact[column];
      low[n] = round_to(p.dtype, low_row[column]);
      index[n] = static_cast<double>(column);
    }
    store(values, at, where, value, low, value.cwiseAbs2(), 0);
    store(indices, at, where, index, RowF(index.cast<float>()), index.cwiseAbs2(), 0);
  });
  return {std::move(values), std::move(indices)};
}

}  // namespace attn
