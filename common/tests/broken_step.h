/// \file
/// Versions of a step of which each has one place changed: attn_add_broken_steps generates them, and
/// broken_step.cpp runs them.
#pragma once

#include <string>
#include <vector>

#include "attn/step.h"

namespace attn::tests {

struct Version {
  LaunchFunction launch;
  std::string reason;  ///< words of what must be said of it; "" of the first, which is unchanged
};
extern const std::vector<Version> kVersions;

}  // namespace attn::tests
