/// \file
/// The chapter program: parses the options, runs the steps, prints one line per step.
#pragma once

#include "attn/step.h"

namespace attn {

/// Runs a chapter's program and returns its exit status: 0 every checked step passes; 1 a check
/// failed; 2 invalid option or input file; 3 no requested step supports the problem; 4 the device
/// is out of memory or failed; 77 a GPU is required and there is none.
int run_chapter(const Chapter& chapter, int argc, const char* const* argv);

}  // namespace attn
