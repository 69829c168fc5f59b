/// \file
/// `--timeline`: records one launch of a step in the emulator, on a modelled clock.
#pragma once

#include "attn/status.h"
#include "emulator/trace.h"
#include "run/options.h"
#include "run/output_file.h"
#include "run/results.h"
#include "run/session.h"

namespace attn {

class TimelineRecorder {
 public:
  /// Both have to outlive it.
  TimelineRecorder(const Options& options, const RunResult& run) : options_(options), run_(run) {}

  /// Launches the prepared step under the emulator's discrete-event schedule.
  Status record(Session& session);
  /// Writes the file and prints a line on what it has and what is left out.
  void write(OutputFile& file) const;

 private:
  const Options& options_;
  const RunResult& run_;
  emulator::Trace trace_;
};

}  // namespace attn
