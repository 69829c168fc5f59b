/// \file
/// Names of steps in little room.
#pragma once

#include <string>
#include <vector>

namespace attn::report {

/// One name as it is; of several the numbers: "v1 to v4, v6" for v1_global, v2_coalesced ... All
/// names in full where they are no steps' or not in order, as those of two chapters are.
std::string short_list(const std::vector<std::string>& names);

}  // namespace attn::report
