/// \file
/// Which schedule of the emulator runs: in which order threads take turns, and whether copies under
/// way are done early.
#pragma once

#include <bit>
#include <cstdint>

#include "emulator/simt.h"

namespace attn {

/// Schedule `n` (`--schedule n`), for launches in this thread of the host. Copies are as late as a
/// wait allows, or at once: what is forgotten after a copy, and before it. That goes by the parity
/// of the number's bits, which goes with nothing else that alternates from problem to problem.
inline void choose_schedule(std::uint64_t n) {
  emulator::schedule_seed = n;
  emulator::early_copies = std::popcount(n) % 2 == 0;
}

}  // namespace attn
