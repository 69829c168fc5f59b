/// \file
/// Reads the JSON files that the chapter programs write (schema "attn-results-1").
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "attn/problem.h"

namespace attn::report {

/// What happened to one step, as attn::StepResult says it.
struct StepRow {
  std::string name, operation;
  std::string outcome;  ///< pass, fail, unchecked, unsupported or error
  std::string reason;   ///< of a failure, a refusal or an error
  std::string binding;  ///< the roof that binds
  std::optional<double> median_s;       ///< nothing where nothing was measured
  std::optional<double> share_of_roof;  ///< predicted over measured time
};

/// One run of a chapter program.
struct ResultFile {
  std::filesystem::path path;
  std::string chapter, device, operation;
  Problem problem;
  std::vector<StepRow> steps;
};

/// Reads one file. Throws InputError, in one line that names the file, where it cannot be read or is
/// not what a chapter program writes. Text in the result holds no control characters.
ResultFile read_result_file(const std::filesystem::path& path);

}  // namespace attn::report
