/// \file
/// The chapter program: options in, one line per step out.
#pragma once

#include "attn/step.h"

namespace attn {

/// Runs a chapter's program and returns its exit status: 0 every checked step passes; 1 a check
/// failed; 2 bad option or input file; 3 no asked-for step supports the problem; 4 the device is
/// out of memory or failed; 77 a GPU is required and there is none.
int run_chapter(const Chapter& chapter, int argc, const char* const* argv);

}  // namespace attn
