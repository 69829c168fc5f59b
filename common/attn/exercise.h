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

#include "attn/results.h"
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

/// The shipped step of an exercise, and the same with the launch of `variant`.
const Step& shipped_step(const Exercise&);
Step step_of(const Exercise&, const Variant&);

/// How fast a student's version is beside the shipped one.
struct Speed {
  Problem problem;
  TimeStatistics student, shipped;
  double ratio = 0;   ///< of the medians: 2 means twice the time
  std::string wrong;  ///< what was wrong with an output that was timed; then nothing else counts
};

/// Times both in turns on a GPU, on several inputs that rotate. Outputs are poisoned before every timed
/// launch and checked after it, on a sample of rows. Nothing where there is no GPU, or no problem to time.
std::optional<Speed> measure_speed(const Step& shipped, const Step& student, uint64_t seed);

/// Share of the points for speed: all up to 1.2 x the time of the shipped step, none from 10 x on, and in
/// between in proportion to the logarithm.
double speed_points(double ratio);

/// One launch of that problem between profiler marks. Returns false where there is no GPU.
bool profile_speed_problem(const Step& student, uint64_t seed);

/// With what the counters of that launch must show: `required_flop`, `input_bytes`, `roof_s`.
nlohmann::json to_json(const Speed&, const Step&);

/// The text of "## Hint n" of an exercise's page; nothing beyond the last.
std::optional<std::string> hint(const Exercise&, int n);

}  // namespace attn
