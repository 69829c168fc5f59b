/// \file
/// Profiles: the times of a chapter program and the counters of ncu for one step, in one file
/// (schema "attn-profile-1", docs/results_schema.md).
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "report/counters.h"
#include "report/result_file.h"

namespace attn::report {

/// One step of one run, and its launches under ncu.
struct Profile {
  ResultFile run;  ///< `steps` holds one
  CounterFile counters;

  const StepRow& step() const { return run.steps.front(); }
};

struct ImportOptions {
  std::string step;  ///< empty: from the export's name
  std::string clocks;  ///< "none" or "base"; empty: from the export, else unknown
  bool force = false;  ///< joins files that do not seem to match
};

/// The text of a profile. Throws InputError if a file cannot be read, if there is no such step,
/// and, unless forced, if the two files differ in GPU, element type or problem.
std::string import_profile(const std::filesystem::path& results,
                           const std::filesystem::path& counters, const ImportOptions&);

/// Throws InputError with one line that names the file and the position in it.
Profile read_profile(const std::filesystem::path&);

/// A profile, or an ncu export (`*.csv`) joined with the matching results.
Profile read_profile(const std::filesystem::path&, const std::vector<ResultFile>&);

/// One step, from any of the three file formats. Fields missing in the file are empty.
struct StepData {
  std::string file, chapter, step;
  std::string gpu, compute_capability, dtype;
  std::string problem;       ///< operation and problem, without the seed
  std::string clocks;  ///< clock control of ncu: "none" or "base"
  std::optional<Time> time;  ///< from the chapter program; empty if it did not time
  std::vector<KernelCounters> kernels;
  std::size_t processes = 1;  ///< number of processes that launched the kernels
  std::optional<double> predicted_s;

  /// The sum over the launches under ncu.
  std::optional<double> ncu_s() const { return step_total(kernels).value("time_s"); }
  /// "v1_global (v1.json)"
  std::string title() const;
};

/// The steps of a profile, an ncu CSV or a chapter's JSON; `step` selects one if not empty. Throws
/// InputError, also if there is no such step.
std::vector<StepData> read_steps(const std::filesystem::path&, const std::string& step);
StepData step_data(const ResultFile&, const StepRow&);
StepData step_data(const Profile&);

}  // namespace attn::report
