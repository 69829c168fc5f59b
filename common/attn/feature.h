/// \file
/// Features of a problem besides its sizes: masks, softcap, ALiBi, dropout, ... One table defines
/// for each its option, the refusal of a step without it, and its effect on the reference.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attn/problem.h"
#include "attn/tensor.h"

namespace attn {

/// Scores of a query with a contiguous range of keys, before softmax.
template <class Scalar>
struct ScoreRow {
  const Problem& problem;  ///< one sequence
  const HostTensors& inputs;
  int64_t h, i;              ///< indices of the query head and the query
  int64_t first_key;         ///< key of scores[0]
  std::span<Scalar> scores;  ///< scaled products, after the previous features
  /// derivatives of the scores by the scaled products, for the backward pass
  std::span<Scalar> slopes;
};

/// A row of Q or K, before Q K^T.
template <class Scalar>
struct InputRow {
  const Problem& problem;  ///< one sequence
  const HostTensors& inputs;
  bool of_q;  ///< a row of Q; otherwise of K
  int64_t i;  ///< index of the query or key
  std::span<Scalar> x;
};

/// The file of --nccl-id: of the process, not of a problem.
inline std::string nccl_id_file;

/// One feature. All functions except `get` may be null.
struct Feature {
  enum class Kind { flag, number, list };
  std::string name = {};     ///< in Step::takes and JSON; the option is --name, with dashes
  std::string lacking = {};  ///< the noun in a refusal: "softcap" in "this step has no softcap"
  std::string help = {};  ///< help of its option; empty: options.cpp parses it by its own grammar
  Kind kind = Kind::flag;
  double least = 0, most = 0;  ///< accepted range of its option
  bool whole = false;          ///< integers only
  /// Parses its values from the text of its option, if the option has its own grammar. Throws
  /// InputError.
  std::function<std::vector<double>(const std::string& text)> read = {};
  /// Its values (1 for a flag); empty if the problem does not use it. Null: stored in Problem::own.
  std::function<std::vector<double>(const Problem&)> get = {};
  std::function<void(Problem&, const std::vector<double>&)> set = {};
  /// for an operation's own feature: the default without the option; 0: none
  double otherwise = 0;
  /// For an operation's own feature: simpler problems, tried to reduce a failure, and a description
  /// of the change ("with pages of 1 token").
  std::function<std::vector<std::pair<std::string, Problem>>(const Problem&)> vary = {};
  bool everywhere = false;  ///< all steps support it unless their `refuses` says otherwise
  bool on_matrix = false;   ///< also allowed for softmax over a matrix of scores (Problem::matrix)

  // Reference implementation. Causal masks and windows are in Problem::visible, masks in KeyMask,
  // packed sequences in Layout.
  /// Transforms rows of Q and K before Q K^T.
  void (*rows)(const InputRow<double>&) = nullptr;
  void (*rows_low)(const InputRow<float>&) = nullptr;
  void (*scores)(const ScoreRow<double>&) = nullptr;
  void (*scores_low)(const ScoreRow<float>&) = nullptr;
  /// Error that it adds to a score, for scaled products up to `largest`; and the relative error of
  /// a derivative.
  double (*error)(const Problem&, const HostTensors&, int64_t h, double largest) = nullptr;
  double (*slope_error)(const Problem&) = nullptr;
  /// Factors for the probabilities of query `i` of head `h` of sequence `b`, applied before P V.
  void (*factors)(const Problem&, int64_t b, int64_t h, int64_t i, std::span<double>) = nullptr;

  std::vector<double> values(const Problem&) const;
  void give(Problem&, const std::vector<double>&) const;
  std::string option() const;  ///< "--softcap"
};

/// Features that all attention operations share, in the order in which they change scores.
const std::vector<Feature>& shared_features();

/// The input `alibi`: slopes of the query heads, [1, 1, 1, heads] in fp32.
TensorSpec alibi_slopes(const Problem&);

/// ALiBi slope of a query head: Press, Smith, Lewis, "Train Short, Test Long" (ICLR 2022), section
/// 3; if n, the number of heads, is not a power of two, the published code. For a power of two the
/// slopes are r, r^2 ... r^n with r = 2^(-8/n). Otherwise they are those of the next lower power of
/// two, then every second one of the next higher.
double alibi_slope(int64_t head, int64_t heads);

}  // namespace attn
