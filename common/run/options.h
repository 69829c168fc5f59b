/// \file
/// The options of every chapter program (docs/results_schema.md describes its output).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "attn/problem.h"

namespace attn {

struct Chapter;
struct Operation;

enum class DeviceChoice { automatic, gpu, emulated };
enum class CheckChoice { automatic, full, sample, off };

struct Options {
  bool list = false;
  bool takes = false;  ///< prints the steps that support the problem, runs nothing
  bool operation_given = false;  ///< --list is limited to that operation
  std::vector<std::string> steps;  ///< empty: all that support the problem
  /// default: the operation of --step, else of the chapter's first step
  const Operation* operation = nullptr;
  Problem problem;  ///< after Problem::finish
  /// The operation's own options whose values have a grammar, as typed.
  std::map<std::string, std::string> typed;
  std::optional<uint64_t> schedule;  ///< of the emulator; empty: the problem's seed
  bool races = false;  ///< race detection in the emulator
  DeviceChoice device = DeviceChoice::automatic;
  std::optional<int> gpu_number;  ///< --device gpu:N
  CheckChoice check = CheckChoice::automatic;
  bool time = false;
  int warmup = 3, repeat = 20;
  bool turns = false;  ///< times a step for each line of standard input that names one
  std::string gpu;  ///< datasheet for predictions; empty: this GPU, or the H200
  std::string json, load, save, profile;
  std::string timeline;        ///< file for the emulator's timeline of one launch
  double timeline_limit = 5;   ///< of that file, in MB
  std::string warning;  ///< about an ambiguous reading; one line, or empty
  bool require_gpu = false;
};

/// Parses a command line. Throws InputError with a one-line message for invalid arguments. Returns
/// nothing after printing the help text.
std::optional<Options> parse_options(const Chapter&, int argc, const char* const* argv);

}  // namespace attn
