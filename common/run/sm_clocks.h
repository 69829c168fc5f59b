/// \file
/// The clocks of a GPU's SMs on a common time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "device/recording.h"

namespace attn {

/// Clocks of SMs, mapped to %globaltimer: a straight line per SM, with the rate of its samples,
/// through those of the first call. Times count from the first sample, since nanoseconds of
/// %globaltimer do not fit into a double.
class SmClocks {
 public:
  explicit SmClocks(const std::vector<SmSample>& samples);
  /// Of an SM without samples: by the mean rate, from a point that is known.
  double ns(std::uint32_t sm, std::uint64_t clock, std::uint64_t known_clock,
            std::uint64_t known_ns) const;
  double since_base(std::uint64_t timer_ns) const;
  /// Moves the line of an SM. A clock can stop between the samples and the launch, while its SM is
  /// idle: then the line is off by that time.
  void shift(std::uint32_t sm, double by_ns);
  std::size_t sms() const { return lines_.size(); }
  double mhz = 0;            ///< mean of the SMs
  double residual_ns = 0;    ///< farthest sample from the line of its call
  double resolution_ns = 0;  ///< least change of %globaltimer that was observed

 private:
  struct Line {
    std::uint64_t clock;
    double ns, ns_per_cycle;
  };
  std::uint64_t base_ns_ = 0;
  std::map<std::uint32_t, Line> lines_;
};

}  // namespace attn
