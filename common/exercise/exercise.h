/// \file
/// Exercises: a step with a marked region that the student fills in.
///
/// CMake (attn_add_exercise) replaces the region of the shipped step by the student's file, the
/// stub or a planted wrong answer. The rest is the shipped code, so a skeleton cannot drift from
/// its solution.
///
/// Two programs take part, so that the judged code does not judge itself:
///
/// - ex01a_student contains the student's kernel, and no code that knows the right results. It
///   receives a problem with its inputs, launches, and returns tensors (pipe.h, child.cpp).
/// - judge_01_naive draws the inputs, computes the reference and the bounds, and decides. This
///   header declares its parts.
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
  /// Describes what is wrong with the output of the probe of an index exercise (bank conflicts);
  /// may be null.
  std::optional<std::string> (*judge)(const std::vector<float>& probed) = nullptr;
};

/// The exercises of this program. The files that CMake generates register theirs before main()
/// begins.
std::vector<Exercise>& exercises();
bool add_exercise(Exercise);

/// The shipped step of an exercise.
const Step& shipped_step(const Exercise&);

/// The request to run `p` in another process, without the inputs.
Request request_for(const Step&, const Problem& p, Backend);
/// Draws its inputs, and adds the tensors of the step's plan: the other process makes no plan.
void add_inputs(Request&, const Step&, const Problem& p);

/// Runs the program on the problems of an exercise (or only on problem `only`), on the emulator,
/// and on the GPU if there is one. Prints each problem and stops at the first failure: position,
/// expected and actual value, the command that reproduces it, and the one that shows it as a page.
/// `timeline`: writes that page of problem `only`, on the emulator, instead of judging the numbers
/// of a probe. Returns whether all passed.
bool run_exercise(const Exercise&, StudentProcess&, uint64_t seed, std::optional<int> only,
                  const std::string& timeline = "");

/// Speed of a student's version compared with the shipped one.
struct Speed {
  Problem problem;
  TimeStatistics student, shipped;
  double ratio = 0;   ///< of the medians: 2 means twice the time
  double roof_s = 0;  ///< lower bound from the datasheet of this GPU; 0: not known
  std::string wrong;  ///< the fault of a timed output; then nothing else counts
};

/// Times both versions alternately on a GPU, on several rotating inputs: the shipped step here, the
/// student's in its own process, which reports its time. Every timed output is checked here, on a
/// sample of rows. Returns nothing if there is no GPU or no problem to time.
std::optional<Speed> measure_speed(const Step& shipped, StudentProcess&, uint64_t seed);

/// Share of the points for speed: all up to 1.2 x the time of the shipped step, none from 10 x on,
/// and in between in proportion to the logarithm.
double speed_points(double ratio);

/// One launch of that problem between profiler marks, in the student's process. Returns false if
/// there is no GPU.
bool profile_speed_problem(const Step&, StudentProcess&, uint64_t seed);

/// Includes the limits for that launch's counters: `required_flop`, `input_bytes`, `roof_s`.
nlohmann::json to_json(const Speed&, const Step&);

}  // namespace attn
