/// \file
/// The options that every chapter program takes (docs/results_schema.md describes what it prints).
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
  bool takes = false;              ///< names the steps that take the problem, and runs nothing
  bool operation_given = false;    ///< --list is of that operation alone
  std::vector<std::string> steps;  ///< empty: all that support the problem
  /// without --operation and --step that of the chapter's first step
  const Operation* operation = nullptr;
  Problem problem;  ///< finished
  /// Of the operation's own options those whose text has a grammar of its own: as they were typed.
  std::map<std::string, std::string> typed;
  std::optional<uint64_t> schedule;  ///< of the emulator; nothing: the problem's seed
  bool races = false;  ///< the emulator looks for them
  DeviceChoice device = DeviceChoice::automatic;
  std::optional<int> gpu_number;  ///< --device gpu:N
  CheckChoice check = CheckChoice::automatic;
  bool time = false;
  int warmup = 3, repeat = 20;
  bool turns = false;  ///< times a step for each line of standard input that names one
  std::string gpu;  ///< whose datasheet to predict with; empty: the GPU at hand, or the H200
  std::string json, load, save, profile;
  std::string warning;  ///< of what was taken in one of two ways; a line, or empty
  bool require_gpu = false;
};

/// Parses a command line. Throws InputError, in one line, for anything it cannot take. Returns
/// nothing after it has printed the help text.
std::optional<Options> parse_options(const Chapter&, int argc, const char* const* argv);

}  // namespace attn
