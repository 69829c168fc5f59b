/// \file
/// Chart of time against mask density.
#pragma once

#include <string>
#include <vector>

#include "report/result_file.h"

namespace attn::report {

/// For one step: a curve per head dim, with one point per file. Both axes are relative to the
/// densest file of the curve, so a step whose time is proportional to its work lies on the
/// diagonal. Throws InputError if files differ in GPU, step or operation, lack a time, or if a
/// curve has fewer than two points.
std::string density_svg(const std::vector<ResultFile>&);

}  // namespace attn::report
