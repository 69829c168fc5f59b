/// \file
/// All that keeps a step from a problem, for people: refusal() stops at the first reason.
#pragma once

#include <string>
#include <vector>

#include "attn/step.h"

namespace attn {

/// Every reason, as far as they can be told apart: each feature that the step lacks, its type, and
/// what Step::refuses says when the value that it named first has been replaced by one that it
/// takes. Empty: the step takes the problem.
std::vector<std::string> refusals(const Step&, const Problem&);

}  // namespace attn
