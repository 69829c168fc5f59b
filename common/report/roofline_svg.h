/// \file
/// The roofline as a picture: docs/roofline.md says how to read it.
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

/// Log-log: attention operations a second over operations a byte of modelled HBM traffic. Roofs of
/// the first file; hollow markers where a step is predicted, filled ones where it was measured,
/// arrows from one measured step to the next. Where files hold steps of the same name, each file is
/// a run with a letter (before, after), and arrows lead from a step's run to its next. More labels
/// than fit are numbers, with a key below the plot. Throws InputError where the files are of
/// different GPUs, operations or problems, or hold nothing to draw. `id` begins every id inside.
RooflineSvg roofline_svg(const std::vector<ResultFile>&, const std::string& id = "roofline");

}  // namespace attn::report
