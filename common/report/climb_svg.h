/// \file
/// Chart of the forward steps of several chapters on one problem: the climb from the first naive
/// kernel to the last one, compared with libraries.
#pragma once

#include <string>
#include <vector>

#include "report/result_file.h"

namespace attn::report {

/// A library: its name, and its rate on the same problem.
struct ClimbLine {
  std::string name;
  double flop_per_s = 0;
};

/// Parses "cuDNN=FILE:cudnn": a peer in a document of peers.py or of a third party, on the problem
/// of `run`. Throws InputError for any other form, or if the document lacks the peer or the
/// problem.
ClimbLine read_climb_line(const std::string& text, const ResultFile& run);

/// One file per chapter, in order. Every timed step is a point, on a logarithmic axis of TFLOP/s.
/// Throws InputError if files differ in GPU, operation or problem, or if nothing is timed.
std::string climb_svg(const std::vector<ResultFile>&, const std::vector<ClimbLine>&);

}  // namespace attn::report
