/// \file
/// The answers of a written exercise: "name = value" lines, and what may stand in them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace attn {

using Answers = std::vector<std::pair<std::string, std::string>>;

std::string read_text(const std::string& path);
/// "name = value" lines; # begins a comment. Throws InputError with the line that is none, or is
/// there twice.
Answers read_answers(const std::string& path);
/// Empty where there is none.
std::string answer_to(const Answers&, const std::string& name);

/// What an arithmetic expression is: numbers, + - * / ^ and parentheses, as in 4 * 4096^2 * 128.
/// Nothing if the text is not one expression from its beginning to its end, or has no finite value.
std::optional<double> arithmetic(const std::string& text);

/// A question, and what may be its answer.
struct Question {
  enum class Kind { number, whole, choice, letters };
  std::string name;
  Kind kind = Kind::number;
  std::vector<std::string>
      choices;  ///< letters: one word, of which an answer has some, in its order

  /// "whole", "letters abcde" or the choices, as a key says it. Throws std::invalid_argument where
  /// there are none.
  static Question from_text(const std::string& name, const std::string& text);
  /// "must be one of a, b"
  std::string accepted() const;
  /// The answer as it was understood: a number written out, a choice as it is listed. Throws
  /// InputError, in one line, for what cannot be an answer.
  std::string understood(const std::string& value, const std::string& path) const;
};

/// The answers as they were understood, in the order of the questions; "?" and nothing are "".
/// Throws InputError for what cannot be an answer and for names that nobody asks for.
Answers understood(const Answers&, const std::vector<Question>&, const std::string& path);

/// Whether all are answered; prints those that are not.
bool all_answered(const Answers& understood);

/// Prints what was understood where it is not what was written, and, if a person is there, asks
/// whether that is meant.
bool confirmed(const Answers& understood, const Answers& written);

}  // namespace attn
