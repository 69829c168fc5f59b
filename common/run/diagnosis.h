/// \file
/// Runs the variations of a failed problem, each with one change (check/variations.h).
#pragma once

#include <cstdint>
#include <vector>

#include "check/variations.h"

namespace attn {

/// Runs `step` on the variations of a problem that it fails. In the emulator each variation runs
/// under `schedule` and the two next ones, in its own process, so that a crash is its result. On a
/// GPU the first device failure ends the diagnosis.
std::vector<Varied> diagnose(const Step& step, const Problem&, Backend, std::uint64_t schedule);

}  // namespace attn
