/// \file
/// The table of `attn_report summary`: one row a step, of several runs.
#pragma once

#include <string>
#include <vector>

#include "report/result_file.h"

namespace attn::report {

/// Chapter, step, operation, verdict, time, share of the roof that binds; device and problem above
/// the table where all rows have the same. A step that was not timed has the least time that its
/// model allows and the roof that binds, and a line says on which GPU.
std::string summary_text(const std::vector<ResultFile>&);

}  // namespace attn::report
