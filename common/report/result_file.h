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
  std::vector<std::string> shape;  ///< of a failure, in lines; absent in older files
  bool pass = false;
  int64_t rows_checked = 0;
  std::optional<double> worst_row_error, bound;  ///< empty if not finite
};

/// A rate, measured or from a datasheet.
struct RoofRow {
  std::string name;  ///< key in the file: "hbm_copy", "tensor_bf16", ...
  double per_second = 0;
  std::string source;  ///< "measured" or "datasheet"
};

/// The result of a step, as in attn::StepResult.
struct StepRow {
  std::string name, operation;
  std::string outcome;  ///< pass, fail, unchecked, unsupported or error
  std::string reason;   ///< of a failure, a refusal or an error
  std::string binding;  ///< the roof that binds
  std::optional<double> median_s;  ///< empty if not measured
  std::optional<Time> time;
  std::optional<double> share_of_roof;  ///< predicted over measured time
  double flop = 0, modelled_bytes = 0, predicted_s = 0;
  std::optional<double> memory_bytes;  ///< device memory needed; absent in older files
  std::vector<PhaseRow> phases;
  std::vector<VerdictRow> verdicts;
  /// For a failure: "passes without --causal; fails with one head". Absent in older files.
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
  std::string roofs_of;  ///< GPU whose roofs the predictions use
  std::vector<RoofRow> roofs;
  Problem problem;
  std::vector<StepRow> steps;
};

/// Reads a file. Throws InputError with one line that names the file if it cannot be read or was
/// not written by a chapter program. Text in the result contains no control characters.
ResultFile read_result_file(const std::filesystem::path& path);

/// Describes its problem: rows and columns, or an attention problem.
std::string problem_text(const ResultFile&);

/// The fields of that file that a profile (report/profile.h) shares: all except `steps`, and a
/// step.
ResultFile read_run(const Object&, const std::filesystem::path&);
StepRow read_step(const Object&);

}  // namespace attn::report
