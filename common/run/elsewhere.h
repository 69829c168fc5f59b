/// \file
/// Which steps of other chapters support a problem: asks their programs, in the same folder, with
/// --takes.
#pragma once

#include <string>
#include <vector>

#include "attn/step.h"
#include "run/options.h"

namespace attn {

/// The steps of this chapter that support the problem.
std::vector<std::string> steps_that_take(const Chapter&, const Operation&, const Problem&);

/// Prints the steps of all chapters that support the problem of `arguments`, the command line
/// without the program's name: "steps that take it: 04_flash_v2 v12_features v13_tuned".
void print_who_takes(const Chapter&, const Options&, const std::vector<std::string>& arguments);

}  // namespace attn
