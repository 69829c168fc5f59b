/// \file
/// Versions of a step, each changed in one place: attn_add_broken_steps generates them, and
/// broken_step.cpp runs them.
#pragma once

#include <string>
#include <vector>

#include "attn/step.h"

namespace attn::tests {

struct Version {
  LaunchFunction launch;
  /// Words that the report must contain; "" for the first version, which is unchanged. "race: A |
  /// B": a race between a line that contains A and one that contains B.
  std::string reason;
  LaunchFunction prepare = nullptr;  ///< for steps with their own
};
extern const std::vector<Version> kVersions;
extern const char* const kFolder;  ///< folder of their files: 1.cu, 2.cu, ...
extern const char* const kStep;  ///< the changed step

}  // namespace attn::tests
