/// \file
/// The versions of one step in a program with a student's kernel. CMake (attn_add_exercise) writes
/// the list.
#pragma once

#include <string>
#include <vector>

#include "attn/step.h"

namespace attn {

/// A version of an exercise's step.
struct Variant {
  std::string name;  ///< "student", "solution", "stub", or a mutant's name
  Launch launch;
  /// The numbers that the judge of an index exercise asks for (offsets, products); may be null.
  /// Throws std::runtime_error if they cannot be computed.
  std::vector<float> (*probe)() = nullptr;
  Launch prepare = {};  ///< the shipped step's; runs once before
};

/// Defined in a file that CMake generates.
const std::vector<Variant>& variants();

}  // namespace attn
