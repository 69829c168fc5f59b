/// \file
/// The table of `attn_report summary`: one row per step, for several runs.
#pragma once

#include <string>
#include <vector>

#include "report/result_file.h"

namespace attn::report {

/// Chapter, step, operation, verdict, time, share of the binding roof; device and problem appear
/// above the table if they are the same for all rows. For a step that was not timed: the lower
/// bound of its model and the binding roof, and a line with the GPU.
std::string summary_text(const std::vector<ResultFile>&);

}  // namespace attn::report
