/// \file
/// The forward steps of several chapters on one problem, as a picture: the climb from the first
/// naive kernel to the last one, and how far libraries are.
#pragma once

#include <string>
#include <vector>

#include "report/result_file.h"

namespace attn::report {

/// A library: its name, and what it reaches on the same problem.
struct ClimbLine {
  std::string name;
  double flop_per_s = 0;
};

/// "cuDNN=FILE:cudnn": a peer of a document of peers.py or of others, on the problem of `run`.
/// Throws InputError for another form, or where that document has no such peer or problem.
ClimbLine read_climb_line(const std::string& text, const ResultFile& run);

/// One file per chapter, in order; every timed step is a point, on a logarithmic axis of TFLOP/s.
/// Throws InputError where files are of several GPUs, operations or problems, or nothing is timed.
std::string climb_svg(const std::vector<ResultFile>&, const std::vector<ClimbLine>&);

}  // namespace attn::report
