/// \file
/// Exercises: a step with a marked region that the student fills in.
///
/// CMake (attn_add_exercise) cuts the region out of the shipped step and puts the student's file,
/// the stub or a planted wrong answer in its place; all the rest is the shipped code, so a skeleton
/// cannot drift from its solution.
///
/// Two programs take part, so that whoever is judged does not judge:
///
/// - ex01a_student holds the student's kernel and nothing that knows what is right. It gets a
/// problem with
///   its inputs, launches, and gives back tensors (pipe.h, child.cpp).
/// - judge_01_naive draws the inputs, has the reference and the bounds, and says right or wrong. It
/// is what
///   this header is about.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "exercise/pipe.h"
#include "run/results.h"
#include "attn/step.h"

namespace attn {

/// An exercise of a chapter.
struct Exercise {
  std::string name;  ///< "ex01a"
  std::string kind;  ///< "fill", "index", "bughunt"
  std::string step;  ///< "v1_global"
  /// What is wrong with what the program's probe found (an index exercise: bank conflicts); may be
  /// null.
  std::optional<std::string> (*judge)(const std::vector<float>& probed) = nullptr;
};

/// The exercises of this program: the files that CMake generates add theirs before main() begins.
std::vector<Exercise>& exercises();
bool add_exercise(Exercise);

/// The shipped step of an exercise.
const Step& shipped_step(const Exercise&);

/// What a step needs to run `p` in another process, without the inputs.
Request request_for(const Step&, const Problem& p, Backend);

/// Runs the program on the problems of an exercise (or on number `only` of them), on the emulator,
/// and on the GPU if there is one. Prints each problem, stops at the first failure: where,
/// expected, got, and the command that shows it again. Returns whether all passed.
bool run_exercise(const Exercise&, StudentProcess&, uint64_t seed, std::optional<int> only);

/// How fast a student's version is beside the shipped one.
struct Speed {
  Problem problem;
  TimeStatistics student, shipped;
  double ratio = 0;   ///< of the medians: 2 means twice the time
  double roof_s = 0;  ///< by the datasheet no GPU of this kind is faster; 0: not known
  std::string wrong;  ///< what was wrong with an output that was timed; then nothing else counts
};

/// Times both in turns on a GPU, on several inputs that rotate: the shipped step here, the
/// student's in its own process, which says how long it took. Every output that was timed is judged
/// here, on a sample of rows. Nothing where there is no GPU, or no problem to time.
std::optional<Speed> measure_speed(const Step& shipped, StudentProcess&, uint64_t seed);

/// Share of the points for speed: all up to 1.2 x the time of the shipped step, none from 10 x on,
/// and in between in proportion to the logarithm.
double speed_points(double ratio);

/// One launch of that problem between profiler marks, in the student's process. Returns false where
/// there is no GPU.
bool profile_speed_problem(const Step&, StudentProcess&, uint64_t seed);

/// With what the counters of that launch must show: `required_flop`, `input_bytes`, `roof_s`.
nlohmann::json to_json(const Speed&, const Step&);

}  // namespace attn
