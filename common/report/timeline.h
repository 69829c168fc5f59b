/// \file
/// What a timeline shows (`--timeline`, docs/timelines.md): waits, units, marks and the longest
/// chain.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace attn::report {

/// Sums over the blocks of a file. Times in microseconds, shares from 0 to 1.
struct TimelineSummary {
  std::string file, chapter, step, problem, left_out;
  std::string gpu;      ///< on which it was measured; empty: a model
  std::string warning;  ///< on what recording costs; or empty
  std::string lost;     ///< what a GPU has not recorded; or empty
  std::string failed;   ///< why the launch has failed; or empty
  /// Of the time of all SMs of a GPU: busy, waiting, idle.
  std::map<std::string, double> sms;
  std::size_t blocks = 0, all_blocks = 0;  ///< in the file; of the launch
  double us = 0, all_us = 0;  ///< from the start to the last event; of the launch
  double block_us = 0;  ///< mean of the blocks
  /// Of the time of a block: tensor core, special functions, TMA, cp.async; two units at a time.
  std::map<std::string, double> busy, together;
  /// Of the time of those warps that wait there at all, per barrier without its index.
  std::map<std::string, double> waits;
  static constexpr double kOneWarpgroup = -1;
  struct Mark {
    double us = 0;       ///< per warp that has it
    double at_once = 0;  ///< two warpgroups are in it: of the time in which at least one is
  };
  std::map<std::string, Mark> marks;
  /// What the longest chain consists of, the longest part first: how often, and microseconds.
  struct Part {
    std::string what;
    int times = 0;
    double us = 0;
  };
  std::vector<Part> chain;
};

/// The events of a file by kind. Times in microseconds.
struct TimelineEvents {
  using Track = std::pair<std::size_t, std::size_t>;  ///< block, from 1; unit, or warp from 1
  struct Span {
    double begin, end;
    std::string name, source{};
  };
  struct Flight : Span {
    std::size_t issuer;
    std::string reads{}, writes{};  ///< tiles of shared memory: "sQ[0], sK[1]"
  };
  struct Point {
    Track track;
    double at;
  };
  std::map<Track, std::vector<Span>> waits, marks, units;
  std::map<Track, double> ends;                        ///< of the last event
  std::map<std::size_t, double> begins;                ///< of each block
  std::map<std::size_t, std::vector<Flight>> flights;  ///< of each block
  /// Where an arrow ends, and its start.
  std::map<Track, std::vector<std::pair<double, Point>>> sources;
  double end = 0;
};

/// "tensor core" of emulator::kTensorTrack.
std::string unit_name(std::size_t track);

/// Throws InputError for a file that is no timeline. `events`: also its events.
TimelineSummary read_timeline(const std::string& path, TimelineEvents* events = nullptr);

std::string text(const TimelineSummary&);
/// How B differs from A: in words, and as a table.
std::string text(const TimelineSummary& a, const TimelineSummary& b);

}  // namespace attn::report
