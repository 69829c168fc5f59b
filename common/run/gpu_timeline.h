/// \file
/// The timeline of a launch that a GPU has recorded (device/recording.h): records become the spans,
/// flights and arrows that the emulator draws, in nanoseconds.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "device/recording.h"
#include "emulator/trace.h"
#include "run/sm_clocks.h"

namespace attn {

/// Shares of the time of all SMs on which a block ran: `busy`, some warp ran; `waiting`, all warps
/// of its blocks waited; `idle`, no block was there.
struct SmShares {
  double busy = 0, waiting = 0, idle = 0;
};

/// What else is known of a recorded launch.
struct GpuTimeline {
  std::size_t blocks = 0, sms = 0;
  emulator::Cycles end_ns = 0;
  SmShares shares;                  ///< of the whole launch
  std::vector<SmShares> over_time;  ///< of equal parts of it
  double moved_ns = 0;       ///< most that the line of an SM was moved to the begins of its blocks
  double begins_off_ns = 0;  ///< farthest begin of a block from its own reading of %globaltimer
  std::string lost;          ///< rings that were full, in one line; or empty
};

/// Adds as many blocks to `trace` as a file of `most_bytes` may have room for, in the order of
/// their begin. `trace` must be in nanoseconds. `step_file` must outlive it:
/// "06_flash_v3_hopper/v6_pingpong.cu".
GpuTimeline add_to_trace(const RecordedLaunch& launch, const char* step_file,
                         std::size_t most_bytes, emulator::Trace& trace);

}  // namespace attn
