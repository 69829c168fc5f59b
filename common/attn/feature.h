/// \file
/// What a problem may have besides its sizes: masks, softcap, ALiBi, dropout ... One table says of
/// each its option, what a step without it answers, and what it does to the reference.
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

/// Scores of a query with some keys of one run, before softmax.
template <class Scalar>
struct ScoreRow {
  const Problem& problem;  ///< its sequence
  const HostTensors& inputs;
  int64_t h, i;              ///< query head and query
  int64_t first_key;         ///< of scores[0]
  std::span<Scalar> scores;  ///< scaled products, or what the features before made of them
  std::span<Scalar> slopes;  ///< their derivatives by the scaled products, for the backward pass
};

/// A row of Q or of K, before products.
template <class Scalar>
struct InputRow {
  const Problem& problem;  ///< its sequence
  const HostTensors& inputs;
  bool of_q;  ///< or of K
  int64_t i;  ///< query or key
  std::span<Scalar> x;
};

/// One feature. All functions but `get` may be null.
struct Feature {
  enum class Kind { flag, number, list };
  std::string name = {};     ///< in Step::takes and in JSON; its option is --name, with dashes
  std::string lacking = {};  ///< "softcap": "this step has no softcap"
  std::string help = {};     ///< of its option; empty: options.cpp reads it by a grammar of its own
  Kind kind = Kind::flag;
  double least = 0, most = 0;  ///< what its option accepts
  bool whole = false;          ///< whole numbers alone
  /// Its numbers from the text of its option, where that has a grammar of its own. Throws
  /// InputError.
  std::function<std::vector<double>(const std::string& text)> read = {};
  /// Its numbers (1 of a flag); none where a problem has it not. Null: it lies in Problem::own.
  std::function<std::vector<double>(const Problem&)> get = {};
  std::function<void(Problem&, const std::vector<double>&)> set = {};
  double otherwise = 0;     ///< of an operation's own: what it is without the option; 0: nothing
  /// Of an operation's own: problems that are simpler in it, with which a failure is tried again,
  /// and the change in words ("with pages of 1 token").
  std::function<std::vector<std::pair<std::string, Problem>>(const Problem&)> vary = {};
  bool everywhere = false;  ///< a step has it unless its `refuses` says otherwise
  bool on_matrix = false;   ///< rows of scores alone can have it, too (Problem::matrix)

  // The reference. Causal and window are in Problem::visible, masks in KeyMask, packed sequences in
  // Layout.
  /// What rows of Q and of K become before they are multiplied.
  void (*rows)(const InputRow<double>&) = nullptr;
  void (*rows_low)(const InputRow<float>&) = nullptr;
  void (*scores)(const ScoreRow<double>&) = nullptr;
  void (*scores_low)(const ScoreRow<float>&) = nullptr;
  /// What it adds to the error of a score, where scaled products go up to `largest`; and, relative,
  /// of a slope.
  double (*error)(const Problem&, const HostTensors&, int64_t h, double largest) = nullptr;
  double (*slope_error)(const Problem&) = nullptr;
  /// What the probabilities of query `i` of head `h` of sequence `b` are multiplied with before
  /// they meet V.
  void (*factors)(const Problem&, int64_t b, int64_t h, int64_t i, std::span<double>) = nullptr;

  std::vector<double> values(const Problem&) const;
  void give(Problem&, const std::vector<double>&) const;
  std::string option() const;  ///< "--softcap"
};

/// The features that all operations of attention share, in the order in which they change scores.
const std::vector<Feature>& shared_features();

/// The input `alibi`: the slopes of the query heads, [1, 1, 1, heads] in fp32.
TensorSpec alibi_slopes(const Problem&);

/// The slope of a query head, as the paper gives it: Press, Smith, Lewis, "Train Short, Test Long"
/// (ICLR 2022), section 3, and for n heads that are no power of two its published code. With n a
/// power of two the slopes are r, r^2 ... r^n with r = 2^(-8/n); else those of the next lower
/// power, then every second one of the next higher.
double alibi_slope(int64_t head, int64_t heads);

}  // namespace attn
