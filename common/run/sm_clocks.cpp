#include "run/sm_clocks.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace attn {
namespace {

double difference(std::uint64_t a, std::uint64_t b) {
  return static_cast<double>(static_cast<std::int64_t>(a - b));
}

}  // namespace

SmClocks::SmClocks(const std::vector<SmSample>& samples) {
  std::map<std::uint32_t, std::vector<SmSample>> by_sm;
  for (const SmSample& s : samples) {
    if (s.ns == 0) continue;  // not written
    by_sm[s.sm].push_back(s);
    base_ns_ = base_ns_ == 0 ? s.ns : std::min(base_ns_, s.ns);
    const double least = s.resolution_ns;
    if (least > 0) resolution_ns = resolution_ns == 0 ? least : std::min(resolution_ns, least);
  }
  for (const auto& [sm, some] : by_sm) {
    // Least squares on differences to the first sample, which fit into doubles.
    const SmSample& first = *std::ranges::min_element(some, {}, &SmSample::clock);
    const auto point = [&](const SmSample& s) {
      return std::pair(difference(s.clock, first.clock), difference(s.ns, first.ns));
    };
    double x = 0, y = 0, xx = 0, xy = 0;
    for (const SmSample& s : some) {
      const auto [dx, dy] = point(s);
      x += dx, y += dy, xx += dx * dx, xy += dx * dy;
    }
    const auto n = static_cast<double>(some.size());
    const double determinant = n * xx - x * x;
    if (determinant <= 0) continue;
    const double slope = (n * xy - x * y) / determinant, offset = (y - slope * x) / n;
    if (slope <= 0) continue;
    lines_[sm] = {first.clock, since_base(first.ns) + offset, slope};
    for (const SmSample& s : some) {
      const auto [dx, dy] = point(s);
      residual_ns = std::max(residual_ns, std::abs(offset + slope * dx - dy));
    }
    mhz += 1000 / slope;
  }
  if (!lines_.empty()) mhz /= static_cast<double>(lines_.size());
}

double SmClocks::since_base(std::uint64_t timer_ns) const { return difference(timer_ns, base_ns_); }

double SmClocks::ns(std::uint32_t sm, std::uint64_t clock, std::uint64_t known_clock,
                    std::uint64_t known_ns) const {
  const auto line = lines_.find(sm);
  if (line == lines_.end())
    return since_base(known_ns) + difference(clock, known_clock) * (mhz > 0 ? 1000 / mhz : 1);
  const Line& l = line->second;
  return l.ns + difference(clock, l.clock) * l.ns_per_cycle;
}

}  // namespace attn
