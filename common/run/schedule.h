/// \file
/// Selects the emulator's schedule: the order in which threads run, and whether asynchronous copies
/// complete early or late.
#pragma once

#include <bit>
#include <cstdint>

#include "emulator/simt.h"

namespace attn {

/// Selects schedule `n` (`--schedule n`) for launches in this host thread. Copies complete either
/// immediately or as late as a wait allows: the first exposes a missing synchronisation before a
/// copy, the second one after it. The parity of the bits of `n` decides, which is independent of
/// anything else that alternates from problem to problem.
inline void choose_schedule(std::uint64_t n) {
  emulator::schedule_seed = n;
  emulator::early_copies = std::popcount(n) % 2 == 0;
}

}  // namespace attn
