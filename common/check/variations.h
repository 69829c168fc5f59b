/// \file
/// Diagnosis by variation: the same problem with one thing changed, so that a failure says what it
/// needs.
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

/// The changes that a problem can have: without its mask, with a mask over equal lengths, without
/// each of softcap, ALiBi and dropout; with one head; with one sequence, the longest; of an
/// operation on rows of scores (a softmax) with one row; what features of the operation's own name
/// (Feature::vary); with lengths that are whole tiles, of the step or of 128.
std::vector<Variation> variations(const Problem&, const Operation&, const std::optional<Tiling>&);

/// What a step did with a variation.
struct Varied {
  enum class Outcome {
    pass,
    fail,         ///< wrong numbers
    stopped,      ///< none: a deadlock, a crash, a write where it must not
    unsupported,  ///< refused
    not_tried,
  };
  Outcome outcome = Outcome::not_tried;
  std::string reason;       ///< of all but a pass
  std::string change = {};  ///< empty: of all changes
};
std::string_view name(Varied::Outcome);

/// Why a problem is not varied: it is too large to be run several times again, or its inputs cannot
/// be drawn.
std::optional<Varied> not_varied(const Problem&, bool rows_alone, Backend);

/// "passes without --causal; stops with one head (deadlock: ...)"; empty if there is nothing to
/// say. What stops for the reason of the `failure` itself stops likewise.
std::string varied_text(const std::vector<Varied>&, std::string_view failure);

}  // namespace attn
