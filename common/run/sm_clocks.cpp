#include "run/sm_clocks.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace attn {
namespace {

// Samples of one call are 2000 ns apart (device/recording.cu).
constexpr double kBetweenCallsNs = 20'000;

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
  for (auto& [sm, some] : by_sm) {
    std::ranges::sort(some, {}, &SmSample::clock);
    // The clock can stand still between the calls that sample it, while the SM is idle. So each
    // call has an offset of its own, and all have one rate: least squares on differences to the
    // first sample, which fit into doubles.
    struct Point {
      double x, y;
    };
    std::vector<std::vector<Point>> calls;
    for (std::size_t n = 0; n < some.size(); ++n) {
      if (n == 0 || difference(some[n].ns, some[n - 1].ns) > kBetweenCallsNs) calls.emplace_back();
      calls.back().push_back(
          {difference(some[n].clock, some[0].clock), difference(some[n].ns, some[0].ns)});
    }
    const auto mean = [](const std::vector<Point>& points) {
      Point m{0, 0};
      for (const Point& p : points) m.x += p.x, m.y += p.y;
      const auto n = static_cast<double>(points.size());
      return Point{m.x / n, m.y / n};
    };
    double xx = 0, xy = 0;
    for (const auto& points : calls)
      for (const Point m = mean(points); const Point& p : points)
        xx += (p.x - m.x) * (p.x - m.x), xy += (p.x - m.x) * (p.y - m.y);
    const double slope = xx > 0 ? xy / xx : 0;
    if (slope <= 0) continue;
    for (const auto& points : calls)
      for (const Point m = mean(points); const Point& p : points)
        residual_ns = std::max(residual_ns, std::abs(p.y - m.y - slope * (p.x - m.x)));
    const Point m = mean(calls.front());
    lines_[sm] = {some[0].clock, since_base(some[0].ns) + m.y - slope * m.x, slope};
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

void SmClocks::shift(std::uint32_t sm, double by_ns) {
  if (const auto line = lines_.find(sm); line != lines_.end()) line->second.ns += by_ns;
}

}  // namespace attn
