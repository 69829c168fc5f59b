/// \file
/// Places labels next to points so that they cover neither each other nor the drawing.
#pragma once

#include <string>
#include <vector>

namespace attn::report {

struct Box {
  double left = 0, top = 0, right = 0, bottom = 0;
};
bool overlap(const Box&, const Box&);

struct Segment {
  double x1 = 0, y1 = 0, x2 = 0, y2 = 0;
};

/// A text of width x height that belongs to the point (x, y).
struct Label {
  double x = 0, y = 0, width = 0, height = 0;
  Box box;  ///< its placement
  bool leader = false;  ///< far enough from its point to need a line to it
};

/// From the label's point to the nearest side of `box`.
Segment leader_to(const Label&, const Box& box);

/// Sets the boxes, inside `page`. No box overlaps another or an obstacle as long as there is room.
/// Among the free places, takes the nearest one that covers the fewest lines.
void place_labels(std::vector<Label>&, const Box& page, std::vector<Box> obstacles,
                  const std::vector<Segment>& lines);

}  // namespace attn::report
