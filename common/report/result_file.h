/// \file
/// Reads the JSON files that the chapter programs write (schema "attn-results-1").
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "attn/problem.h"

namespace attn::report {

class Object;

/// Median and quartiles of the timed launches, in seconds.
struct Time {
  double median = 0, q1 = 0, q3 = 0;
  int count = 0;
};

/// One phase (kernel) of a step: its model, and its time where it was measured.
struct PhaseRow {
  std::string name, binding;
  double predicted_s = 0;
  double tensor_flop = 0, fp32_flop = 0, exp = 0;
  double hbm_read = 0, hbm_write = 0;
  double l2_bytes = 0;  ///< 0: not modelled
  std::optional<Time> time;

  double hbm_bytes() const { return hbm_read + hbm_write; }
};

/// The check of one tensor.
struct VerdictRow {
  std::string tensor, failure;
  std::vector<std::string> shape;  ///< of a failure, in lines; files of before lack it
  bool pass = false;
  int64_t rows_checked = 0;
  std::optional<double> worst_row_error, bound;  ///< nothing where not finite
};

/// A rate that was measured, or that the vendor states.
struct RoofRow {
  std::string name;  ///< as in the file: "hbm_copy", "tensor_bf16", ...
  double per_second = 0;
  std::string source;  ///< "measured" or "datasheet"
};

/// What happened to one step, as attn::StepResult says it.
struct StepRow {
  std::string name, operation;
  std::string outcome;  ///< pass, fail, unchecked, unsupported or error
  std::string reason;   ///< of a failure, a refusal or an error
  std::string binding;  ///< the roof that binds
  std::optional<double> median_s;       ///< nothing where nothing was measured
  std::optional<Time> time;
  std::optional<double> share_of_roof;  ///< predicted over measured time
  double flop = 0, modelled_bytes = 0, predicted_s = 0;
  std::optional<double> memory_bytes;  ///< that it needs on the device; files of before lack it
  std::vector<PhaseRow> phases;
  std::vector<VerdictRow> verdicts;
  /// Of a failure: "passes without --causal; fails with one head". Files of before lack it.
  std::string varied;
};

/// One run of a chapter program.
struct ResultFile {
  std::filesystem::path path;
  std::string chapter, device, operation;
  bool on_gpu = false;
  std::string gpu;  ///< "NVIDIA H200"; empty where emulated
  std::string compute_capability;  ///< "9.0"; empty where emulated
  int cuda_driver = 0, cuda_runtime = 0;
  std::string roofs_of;  ///< whose roofs the predictions use
  std::vector<RoofRow> roofs;
  Problem problem;
  std::vector<StepRow> steps;
};

/// Reads one file. Throws InputError, in one line that names the file, where it cannot be read or
/// is not what a chapter program writes. Text in the result holds no control characters.
ResultFile read_result_file(const std::filesystem::path& path);

/// Its problem in words: rows and columns, or a problem of attention.
std::string problem_text(const ResultFile&);

/// The parts of that file which a profile (report/profile.h) has too: all but `steps`, and a step.
ResultFile read_run(const Object&, const std::filesystem::path&);
StepRow read_step(const Object&);

}  // namespace attn::report
