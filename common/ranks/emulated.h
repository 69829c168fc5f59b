/// \file
/// Emulated ranks: their work is recorded, then run rank by rank on the CPU.
#pragma once

#include <optional>

#include "ranks/rank.h"

namespace attn::ranks {

/// What tests plant in the runs of emulated ranks: faults of transfers, and more.
struct Faults {
  // The n-th message that is sent, counted over all ranks:
  std::optional<int> lost = {};   ///< never arrives
  std::optional<int> late = {};   ///< never written: its wait waits for nothing
  std::optional<int> stale = {};  ///< has what the last message between the same ranks had
  bool ungrouped = false;         ///< messages of a group wait for one another
  // No faults:
  bool early = false;  ///< messages arrive as early as possible, not as late
  int runs = 1;        ///< of the program, one after the other, in the same buffers
};
inline thread_local Faults planted;

/// Runs a program on `world` emulated ranks. A message is copied when one of its two ranks waits
/// for it, not before: a buffer that is overwritten or read too early shows in the result. If no
/// rank can go on, the error names the rank, its peer, the exchange and the bytes. `finish` runs
/// once for each rank, after all of them.
Status run_emulated(int world, const Program&, const std::function<void(Rank&)>& finish,
                    double timeout_s);

}  // namespace attn::ranks
