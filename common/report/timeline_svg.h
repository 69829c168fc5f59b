/// \file
/// A small picture of a few blocks of timelines, as an SVG file for a page.
#pragma once

#include <string>
#include <vector>

namespace attn::report {

struct TimelinePicture {
  std::vector<std::size_t> blocks{0};
  /// Begin of the window in microseconds, of all files or of each one; and its length, 0: all.
  std::vector<double> from;
  double us = 0;
  /// "NAME" or "NAME=LABEL". Empty: all units, and the first warp of each warpgroup.
  std::vector<std::string> lanes;
  std::string title;  ///< empty: chapter and steps
};

/// Files one below the other, on one scale of time. Throws InputError.
std::string timeline_svg(const std::vector<std::string>& files, const TimelinePicture& picture);

}  // namespace attn::report
