/// \file
/// Abbreviated lists of step names.
#pragma once

#include <string>
#include <vector>

namespace attn::report {

/// A single name as it is; several as numbers: "v1 to v4, v6" for v1_global, v2_coalesced ... All
/// names in full if they are not step names or not in order, as with two chapters.
std::string short_list(const std::vector<std::string>& names);

}  // namespace attn::report
