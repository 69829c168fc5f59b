/// \file
/// All reasons for which a step refuses a problem, for messages; refusal() stops at the first.
#pragma once

#include <string>
#include <vector>

#include "attn/step.h"

namespace attn {

/// Every reason that can be told apart: each feature that the step lacks, its type, and the result
/// of Step::refuses after the value it named first has been replaced by a supported one. Empty: the
/// step supports the problem.
std::vector<std::string> refusals(const Step&, const Problem&);

}  // namespace attn
