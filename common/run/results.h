/// \file
/// The results of a run, and their JSON schema (docs/results_schema.md).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "check/check.h"
#include "check/variations.h"
#include "device/device.h"
#include "device/roofline.h"

namespace attn {

/// Median, quartiles and number of timed launches, in seconds.
struct TimeStatistics {
  double median = 0, q1 = 0, q3 = 0, fastest = 0;
  int count = 0;
};
/// Needs at least one sample.
TimeStatistics statistics(std::vector<double> seconds);

/// The result of one step.
struct StepResult {
  enum class Outcome { pass, fail, unchecked, unsupported, error };
  std::string step, operation;
  Outcome outcome = Outcome::unchecked;
  std::string reason;  ///< of a failure, a refusal or an error
  std::vector<Verdict> verdicts;
  std::vector<Varied> variations;  ///< of a failure
  Cost cost;
  Prediction prediction;
  double flop = 0, compulsory_bytes = 0;
  /// For an operation rated by its useful bytes (compulsory_bytes): the time to read them at the
  /// read roof. Divided by the measured time it is the share of that roof.
  std::optional<double> read_s;
  /// device memory needed; empty if the step does not support the problem
  std::optional<double> memory_bytes;
  std::optional<TimeStatistics> time;
  /// host time of planning before the launch; not part of the other times
  std::optional<TimeStatistics> plan_time;
  bool launch_hidden = true;  ///< of all timed launches
  std::vector<std::pair<std::string, TimeStatistics>> phase_times;

  /// Predicted over measured time: the achieved share of the binding roof.
  std::optional<double> share_of_roof() const;
};
std::string_view name(StepResult::Outcome);

struct RunResult {
  std::string chapter, device, operation;
  Backend backend = Backend::emulated;
  Problem problem;
  uint64_t schedule = 0;         ///< of the emulator
  double memory_free_bytes = 0;  ///< on the device, before any allocation
  Roofs roofs;
  std::vector<StepResult> steps;
};

nlohmann::json to_json(const RunResult&);

}  // namespace attn
