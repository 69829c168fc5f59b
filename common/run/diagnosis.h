/// \file
/// Runs a failed problem again with one thing changed (check/variations.h).
#pragma once

#include <cstdint>
#include <vector>

#include "check/variations.h"

namespace attn {

/// Runs `step` on the variations of a problem that it fails. In the emulator each under `schedule`
/// and the two next ones, in a process of its own, so that a crash is its result; on a GPU the
/// first failure of the device ends it.
std::vector<Varied> diagnose(const Step& step, const Problem&, Backend, std::uint64_t schedule);

}  // namespace attn
