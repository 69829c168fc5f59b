/// \file
/// `--timeline`: records one launch of a step, in the emulator on a modelled clock or on a GPU.
#pragma once

#include <optional>
#include <string>

#include "attn/step.h"
#include "attn/status.h"
#include "emulator/shared_trace.h"
#include "emulator/trace.h"
#include "run/gpu_timeline.h"
#include "run/options.h"
#include "run/output_file.h"
#include "run/results.h"
#include "run/session.h"

namespace attn {

class TimelineRecorder {
 public:
  /// Both have to outlive it.
  TimelineRecorder(const Options& options, const RunResult& run) : options_(options), run_(run) {}

  /// Launches the prepared step: under the emulator's discrete-event schedule, or on a GPU in the
  /// build that records. The outputs of the session are those of the recorded launch.
  Status record(Session& session, const Step& step);
  /// Writes the file and prints lines on what it has and what is left out.
  void write(OutputFile& file);

 private:
  // What was measured on a GPU besides the events.
  struct Measured {
    double plain_us = 0, recorded_us = 0;  // of a launch, medians
    double clock_mhz = 0, residual_ns = 0, resolution_ns = 0;
    GpuTimeline of;
    double cost() const { return recorded_us / plain_us - 1; }
  };
  Status record_model(Session&);
  std::string shared_json(const std::string& about, std::size_t room, std::string& left_out);
  Status record_gpu(Session&, const Step&);
  void print_measured() const;

  const Options& options_;
  const RunResult& run_;
  Step recorded_;          // launches the recorded build
  std::string step_file_;  // "06_flash_v3_hopper/v6_pingpong.cu"
  std::optional<Measured> measured_;
  std::optional<emulator::SharedTrace> shared_;  // of a page of the emulator
  emulator::Trace trace_;
};

/// Why a step cannot be recorded on a GPU, with the steps of its chapter that can be; or nothing.
std::optional<std::string> cannot_record(const Chapter&, const Step&);

}  // namespace attn
