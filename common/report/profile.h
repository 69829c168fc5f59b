/// \file
/// Profiles: what a chapter program timed and what ncu counted, of one step, in one file (schema
/// "attn-profile-1", docs/results_schema.md).
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "report/counters.h"
#include "report/result_file.h"

namespace attn::report {

/// One step of one run, and its launches as ncu saw them.
struct Profile {
  ResultFile run;  ///< `steps` holds one
  CounterFile counters;

  const StepRow& step() const { return run.steps.front(); }
};

struct ImportOptions {
  std::string step;    ///< empty: the one that the name of the export says
  std::string clocks;  ///< "none" or "base"; empty: what the export says, else unknown
  bool force = false;  ///< join files that do not seem to belong together
};

/// The text of a profile. Throws InputError where one of the files cannot be read, where there is
/// no such step, and, unless forced, where the two are of different GPUs, element types or
/// problems.
std::string import_profile(const std::filesystem::path& results,
                           const std::filesystem::path& counters, const ImportOptions&);

/// Throws InputError, in one line that names the file and the place in it.
Profile read_profile(const std::filesystem::path&);

/// A profile, or an ncu export (`*.csv`) that is joined to those of the results that it belongs to.
Profile read_profile(const std::filesystem::path&, const std::vector<ResultFile>&);

/// One step as one of the three kinds of file tells it. What a file does not say is empty.
struct StepData {
  std::string file, chapter, step;
  std::string gpu, compute_capability, dtype;
  std::string problem;       ///< operation and problem, without the seed
  std::string clocks;        ///< what ncu did to the clocks: "none" or "base"
  std::optional<Time> time;  ///< by the chapter program; nothing where it did not time
  std::vector<KernelCounters> kernels;
  std::size_t processes = 1;  ///< that the kernels were launched by
  std::optional<double> predicted_s;

  /// The sum over the launches under ncu.
  std::optional<double> ncu_s() const { return step_total(kernels).value("time_s"); }
  /// "v1_global (v1.json)"
  std::string title() const;
};

/// The steps of a profile, of an ncu CSV or of a chapter's JSON; `step` picks one if not empty.
/// Throws InputError, also where there is no such step.
std::vector<StepData> read_steps(const std::filesystem::path&, const std::string& step);
StepData step_data(const ResultFile&, const StepRow&);
StepData step_data(const Profile&);

}  // namespace attn::report
