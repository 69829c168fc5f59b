/// \file
/// What a program with a student's kernel holds: versions of one step. CMake (attn_add_exercise)
/// writes the list.
#pragma once

#include <string>
#include <vector>

#include "attn/step.h"

namespace attn {

/// One version of an exercise's step.
struct Variant {
  std::string name;  ///< "student", "solution", "stub", or a mutant's name
  Launch launch;
  /// What the judge of an index exercise wants to know of it (places, products), as numbers; may be
  /// null. Throws std::runtime_error where it cannot be found out.
  std::vector<float> (*probe)() = nullptr;
  Launch prepare = {};  ///< the step's own: shipped, run once before
};

/// Defined by the file that CMake generates.
const std::vector<Variant>& variants();

}  // namespace attn
