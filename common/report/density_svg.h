/// \file
/// Time over the share of scores that a mask leaves, as a picture.
#pragma once

#include <string>
#include <vector>

#include "report/result_file.h"

namespace attn::report {

/// Of one step: a curve for each head dim, of which each file has a point. Both axes are shares of
/// the densest file of the curve, so that a step whose time is its share of the work is on the
/// diagonal. Throws InputError where files are of several GPUs, steps or operations, have no time,
/// or a curve has less than two points.
std::string density_svg(const std::vector<ResultFile>&);

}  // namespace attn::report
