/// \file
/// Operations: what the steps of a chapter compute, independent of how.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "attn/reference.h"
#include "attn/tensor.h"

namespace attn {

/// What an operation takes and gives, how its work is counted, and what is right.
struct Operation {
  std::string name;
  std::function<std::vector<TensorSpec>(const Problem&)> inputs;   ///< drawn or loaded
  std::function<std::vector<TensorSpec>(const Problem&)> saved;    ///< left by Step::prepare
  std::function<std::vector<TensorSpec>(const Problem&)> outputs;  ///< checked
  /// Useful operations by the field's convention: 4 d B Hq a visible pair forward, 2.5 x backward. 0 for
  /// operations whose rate is said in bytes a second.
  std::function<double(const Problem&)> flop;
  std::function<std::vector<Expected>(const Problem&, const HostTensors&, Selection)> reference;
  /// Bytes that no implementation can avoid: every input read once, every output written once.
  double compulsory_bytes(const Problem&) const;
};

/// The operations that work on rows alone: x is `[B, Hq, seqlen_q, seqlen_k]`, a matrix of B Hq seqlen_q rows
/// and seqlen_k columns.
bool works_on_rows(std::string_view operation);

/// A problem in words: its rows and columns, or Problem::text().
std::string problem_text(const Operation&, const Problem&);

/// Looks an operation up by name; nullptr if there is none.
const Operation* find_operation(std::string_view name);

}  // namespace attn
