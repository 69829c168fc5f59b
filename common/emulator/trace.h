/// \file
/// The record of a timeline, and its file: Chrome trace events, which ui.perfetto.dev opens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "emulator/place.h"

namespace attn::emulator {

using Cycles = std::uint64_t;

/// The clock of the model, to convert cycles to microseconds.
inline constexpr double kClockMhz = 1755;

/// A point of a track from which a flow event starts.
struct Source {
  std::size_t block = 0, track = 0;
  Cycles at = 0;
  bool known = false;
  Cycles span_end = 0;  ///< of a span that goes on after `at`: without it there is no arrow
};

/// What is known of a span beyond its name, or nothing.
struct Details {
  Place source;               ///< of a wait, an arrival, a copy or the first MMA of a group
  std::size_t bytes = 0;      ///< of copies
  std::size_t wgmma = 0;      ///< instructions of a group of MMAs
  std::size_t columns = 0;    ///< the n of their m64nNk16
  std::string reads{}, writes{};  ///< tiles of shared memory: "sQ[0], sK[1]"
};

/// Tracks of a block: its warps from 1 on, then its share of the units.
inline constexpr std::size_t kTensorTrack = 1001, kSpecialTrack = 1002, kTmaTrack = 1003,
                             kLoadsTrack = 1004;

/// What is recorded of a launch.
class Trace {
 public:
  /// `clock_mhz`: of the cycles of all times; 1000 for nanoseconds.
  explicit Trace(double clock_mhz = kClockMhz) : clock_mhz_(clock_mhz) {}
  /// A block in the order of their start; its number.
  std::size_t add_block(std::string name, std::size_t warps);
  /// A block that is left out of the file in any case, after those that were added.
  void omit_block() { ++omitted_; }
  /// What share of all SMs were busy, waited, or had no block from `at` on: a counter.
  void sms(Cycles at, double busy, double waiting, double idle);
  /// A span of a track: kinds "wait", "arrive", "mark", "unit", "exit".
  void span(std::size_t block, std::size_t track, const char* kind, const std::string& name,
            Cycles begin, Cycles end, const Details& details = {});
  /// The same of a unit: continues the last span if there is no gap.
  void busy(std::size_t block, std::size_t track, const std::string& name, Cycles begin,
            Cycles end, const Details& details = {});
  /// Work in flight, which `issuer`'s track has issued; drawn on a track of its own.
  void flight(std::size_t block, std::size_t issuer, const char* kind, const std::string& name,
              Cycles begin, Cycles end, const Details& details = {});
  /// An arrow to the end of a wait.
  void flow(const Source& from, std::size_t block, std::size_t track, Cycles to);

  Cycles end() const { return end_; }
  std::size_t blocks() const { return blocks_.size(); }
  double clock_mhz() const { return clock_mhz_; }

  /// The file's text of at most `limit` bytes. `about`: a JSON object on how it came about. Leaves
  /// out whole blocks first, the last ones; then the end of the time. `left_out` says what, or is
  /// empty.
  std::string json(const std::string& about, std::size_t limit, std::string& left_out) const;

 private:
  struct Span {
    std::size_t track;
    const char* kind;
    std::string name;
    Cycles begin, end;
    Details details;
  };
  struct Flight {
    std::size_t issuer;
    const char* kind;
    std::string name;
    Cycles begin, end;
    std::size_t id;
    Details details;
  };
  struct Flow {
    Source from;
    std::size_t track;
    Cycles to;
    std::size_t id;
  };
  struct Block {
    std::string name;
    std::size_t warps;
    std::vector<Span> spans;
    std::vector<Flight> flights;
    std::vector<Flow> flows;
  };
  std::uint64_t nanoseconds(Cycles cycles) const;
  std::string block_json(std::size_t number, std::size_t shown, Cycles until) const;
  std::string sms_json(std::size_t room) const;

  double clock_mhz_;
  struct Sms {
    Cycles at;
    double busy, waiting, idle;
  };
  std::vector<Sms> sms_;
  std::size_t omitted_ = 0;
  std::vector<Block> blocks_;
  std::size_t ids_ = 0;
  Cycles end_ = 0;
};

/// The text as a JSON string that may also stand in a script element of a page.
std::string quoted(const std::string& text);

}  // namespace attn::emulator
