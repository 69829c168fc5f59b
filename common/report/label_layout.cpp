#include "report/label_layout.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace attn::report {
namespace {

// Whether a line passes through a box, sampled every 2 pixels.
bool crosses(const Segment& s, const Box& b) {
  const double length = std::hypot(s.x2 - s.x1, s.y2 - s.y1);
  const int steps = std::max(1, static_cast<int>(length / 2));
  for (int i = 0; i <= steps; ++i) {
    const double t = static_cast<double>(i) / steps;
    const double x = s.x1 + t * (s.x2 - s.x1), y = s.y1 + t * (s.y2 - s.y1);
    if (x > b.left && x < b.right && y > b.top && y < b.bottom) return true;
  }
  return false;
}

constexpr double kNear = 20;  // farther labels need a leader line

bool around(const Box& b, const Label& l) {
  return l.x > b.left && l.x < b.right && l.y > b.top && l.y < b.bottom;
}

// Whether two lines cross: the ends of each lie on different sides of the other.
bool cross(const Segment& a, const Segment& b) {
  const auto side = [](const Segment& s, double x, double y) {
    return (s.x2 - s.x1) * (y - s.y1) - (s.y2 - s.y1) * (x - s.x1);
  };
  return side(a, b.x1, b.y1) * side(a, b.x2, b.y2) < 0 &&
         side(b, a.x1, a.y1) * side(b, a.x2, a.y2) < 0;
}

// A box whose nearest side touches the circle of `radius` around the label's point.
Box box_at(const Label& l, double angle, double radius) {
  const double dx = std::cos(angle), dy = std::sin(angle);
  const double cx = l.x + dx * (radius + l.width / 2), cy = l.y + dy * (radius + l.height / 2);
  return {cx - l.width / 2, cy - l.height / 2, cx + l.width / 2, cy + l.height / 2};
}

}  // namespace

Segment leader_to(const Label& l, const Box& b) {
  return {l.x, l.y, std::clamp(l.x, b.left, b.right), std::clamp(l.y, b.top + 4, b.bottom - 4)};
}

bool overlap(const Box& a, const Box& b) {
  return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
}

void place_labels(std::vector<Label>& labels, const Box& page, std::vector<Box> obstacles,
                  const std::vector<Segment>& lines) {
  constexpr int kAngles = 16;
  constexpr double kCovered = 1e4;
  for (Label& l : labels) {
    double least = std::numeric_limits<double>::infinity();
    const auto consider = [&](const Box& b, double distance) {
      double cost = distance;
      if (b.left < page.left || b.right > page.right || b.top < page.top || b.bottom > page.bottom)
        cost += 100 * kCovered;
      for (const Box& o : obstacles) cost += overlap(b, o) ? kCovered : 0;
      if (cost >= least) return;
      for (const Segment& s : lines) cost += crosses(s, b) ? 90 : 0;
      if (distance > kNear) {
        const Segment leader = leader_to(l, b);
        for (const Box& o : obstacles) cost += !around(o, l) && crosses(leader, o) ? 60 : 0;
        for (const Segment& s : lines) cost += cross(leader, s) ? 30 : 0;
      }
      if (cost < least) least = cost, l.box = b, l.leader = distance > kNear;
    };
    for (double radius = 10; radius < 400; radius += 8)
      for (int i = 0; i < kAngles; ++i)
        consider(box_at(l, 2 * std::numbers::pi * i / kAngles, radius), radius);
    // No free place along these rays: try anywhere.
    if (least >= kCovered)
      for (double top = page.top; top + l.height <= page.bottom; top += 4)
        for (double left = page.left; left + l.width <= page.right; left += 10) {
          const Box b{left, top, left + l.width, top + l.height};
          const Segment leader = leader_to(l, b);
          consider(b, std::hypot(leader.x2 - leader.x1, leader.y2 - leader.y1));
        }
    // A margin around it.
    obstacles.push_back({l.box.left - 4, l.box.top - 2, l.box.right + 4, l.box.bottom + 2});
  }
}

}  // namespace attn::report
