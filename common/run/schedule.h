/// \file
/// Selects the emulator's schedule: the order in which threads run, and when asynchronous work
/// happens.
#pragma once

#include <cstdint>

#include "emulator/simt.h"

namespace attn {

/// Selects schedule `n` (`--schedule n`) for launches in this host thread. Of three successive ones
/// each is of another kind:
///
///     1, 4, ...   every block has a late warp     copies and products as late as a wait allows
///     2, 5, ...   half of the blocks have one     at once
///     3, 6, ...   every warp for a while          each piece of work late or at once, by chance
///
/// Late work exposes a missing wait after it, early work one before it; the third kind shows what
/// needs both at different places.
inline void choose_schedule(std::uint64_t n) {
  using emulator::LateWarps;
  emulator::schedule_seed = n;
  emulator::early_copies = n % 3 == 2;
  emulator::mixed_copies = n % 3 == 0;
  emulator::late_warps = n % 3 == 1   ? LateWarps::all
                         : n % 3 == 2 ? LateWarps::half
                                      : LateWarps::in_turn;
}

}  // namespace attn
