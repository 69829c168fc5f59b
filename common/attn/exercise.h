/// \file
/// Exercises: a step with a marked region that the student fills in.
///
/// CMake (attn_add_exercise) cuts the region out of the shipped step and puts the student's file, the
/// stub or a planted wrong answer in its place; all the rest is the shipped code, so a skeleton cannot
/// drift from its solution. This header is what the programs made that way share.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "attn/step.h"

namespace attn {

/// One version of an exercise's step.
struct Variant {
  std::string name;  ///< "student", "solution", "stub", or a mutant's name
  Launch launch;
  /// What is wrong with it besides its results (an index exercise: bank conflicts); may be null.
  std::optional<std::string> (*judge)() = nullptr;
};

/// An exercise and the versions of it that a program holds.
struct Exercise {
  std::string name;  ///< "ex01a"
  std::string kind;  ///< "fill", "index", "bughunt"
  std::string step;  ///< "v1_global"
  std::string text;  ///< path of its Markdown page: task, hints, why
  std::vector<Variant> variants;
};

/// Defined by the file that CMake generates.
const Exercise& exercise();

/// Runs `variant` on the cases of an exercise on the emulator, and on the GPU if there is one. Prints
/// each problem, stops at the first failure: where, expected, got. Returns whether all passed.
bool run_exercise(const Exercise&, const Variant&, uint64_t seed);

/// The text of "## Hint n" of an exercise's page; nothing beyond the last.
std::optional<std::string> hint(const Exercise&, int n);

}  // namespace attn
