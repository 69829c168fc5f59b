/// \file
/// The answers of a quiz: "name = value" lines, and the values they may have.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace attn {

using Answers = std::vector<std::pair<std::string, std::string>>;

std::string read_text(const std::string& path);
/// Parses "name = value" lines; # begins a comment. Throws InputError with a line that is malformed
/// or a duplicate.
Answers read_answers(const std::string& path);
/// Empty if there is none.
std::string answer_to(const Answers&, const std::string& name);

/// Evaluates an arithmetic expression: numbers, + - * / ^ and parentheses, as in 4 * 4096^2 * 128.
/// Returns nothing if the text is not a single complete expression, or has no finite value.
std::optional<double> arithmetic(const std::string& text);

/// A question and its possible answers.
struct Question {
  enum class Kind { number, whole, choice, letters };
  std::string name;
  Kind kind = Kind::number;
  std::vector<std::string>
      choices;  ///< letters: one word; an answer is a subset of its letters, in order

  /// Parses "whole", "letters abcde" or the choices, as in a key. Throws std::invalid_argument if
  /// there are none.
  static Question from_text(const std::string& name, const std::string& text);
  /// "must be one of a, b"
  std::string accepted() const;
  /// The normalised answer: a number in full, a choice as listed. Throws InputError with one line
  /// for an invalid answer.
  std::string understood(const std::string& value, const std::string& path) const;
};

/// The normalised answers, in the order of the questions; "?" and missing answers become "". Throws
/// InputError for invalid answers and unknown names.
Answers understood(const Answers&, const std::vector<Question>&, const std::string& path);

/// Whether all questions are answered; prints those that are not.
bool all_answered(const Answers& understood);

/// Prints the normalised answers that differ from the text as written. On a terminal, asks whether
/// they are meant.
bool confirmed(const Answers& understood, const Answers& written);

}  // namespace attn
