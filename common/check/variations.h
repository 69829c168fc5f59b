/// \file
/// Diagnosis by variation: the same problem with one change, which shows what the failure depends
/// on.
///
///     varied: passes without --causal; fails with one head; passes with whole tiles (320, 448)
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attn/step.h"

namespace attn {

/// A problem with one change, and the change in words: "without --causal", "with one head".
struct Variation {
  std::string change;
  Problem problem;
};

/// The possible changes to a problem: no mask; a mask over equal lengths; none of softcap, ALiBi or
/// dropout, one at a time; one head; one sequence, the longest; for an operation on rows of scores
/// (a softmax), one row; the changes of the operation's own features (Feature::vary); lengths that
/// are multiples of the step's tile or of 128.
std::vector<Variation> variations(const Problem&, const Operation&, const std::optional<Tiling>&);

/// The result of a step on a variation.
struct Varied {
  enum class Outcome {
    pass,
    fail,         ///< wrong numbers
    stopped,  ///< no result: a deadlock, a crash, a write out of bounds
    unsupported,  ///< refused
    not_tried,
  };
  Outcome outcome = Outcome::not_tried;
  std::string reason;  ///< unless it passes
  std::string change = {};  ///< empty: all changes together
};
std::string_view name(Varied::Outcome);

/// Why a problem is not varied: it is too large to run several times, or its inputs cannot be
/// drawn.
std::optional<Varied> not_varied(const Problem&, bool rows_alone, Backend);

/// "passes without --causal; stops with one head (deadlock: ...)"; empty if there is nothing to
/// report. A variation that stops for the same reason as `failure` is reported without the reason.
std::string varied_text(const std::vector<Varied>&, std::string_view failure);

}  // namespace attn
