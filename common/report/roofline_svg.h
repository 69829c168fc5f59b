/// \file
/// The roofline chart; docs/roofline.md explains how to read it.
#pragma once

#include <string>
#include <vector>

#include "report/label_layout.h"
#include "report/result_file.h"

namespace attn::report {

struct RooflineSvg {
  std::string text;
  std::vector<Box> labels;  ///< of markers and of flat roofs, for tests
};

/// Log-log: attention operations per second against operations per byte of modelled HBM traffic.
/// Shows the roofs of the first file; hollow markers for predictions, filled markers for
/// measurements, and arrows from each measured step to the next. If files hold steps of the same
/// name, each file is a run with a letter (before, after), and arrows connect the runs of a step.
/// If there are too many labels, points are numbered, with a key below the plot. Throws InputError
/// if the files differ in GPU, operation or problem, or contain nothing to draw. `id` is the prefix
/// of every id in the SVG.
RooflineSvg roofline_svg(const std::vector<ResultFile>&, const std::string& id = "roofline");

}  // namespace attn::report
