/// \file
/// Versions of a step of which each has one place changed: attn_add_broken_steps generates them,
/// and broken_step.cpp runs them.
#pragma once

#include <string>
#include <vector>

#include "attn/step.h"

namespace attn::tests {

struct Version {
  LaunchFunction launch;
  /// Words of what must be said of it; "" of the first, which is unchanged. "race: A | B": a race
  /// between a line that holds A and one that holds B.
  std::string reason;
  LaunchFunction prepare = nullptr;  ///< of steps that have one of their own
};
extern const std::vector<Version> kVersions;
extern const char* const kFolder;  ///< of their files: 1.cu, 2.cu, ...
extern const char* const kStep;    ///< what is changed

}  // namespace attn::tests
