/// \file
/// Markers of the roofline chart and their labels: which steps share a marker, the text of the
/// label, and whether all labels are readable.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "report/label_layout.h"

namespace attn::report {

/// A step of one run.
struct Point {
  std::string name;
  std::size_t file = 0;
  double intensity = 0, predicted = 0, measured = 0;  ///< measured 0: not measured
};

/// Steps at one position of the chart.
struct Marker {
  double x, y;
  std::map<std::size_t, std::vector<std::string>> names;  ///< by file
  double least, most;                                     ///< rates
  bool filled;                                            ///< measured
};

/// The style element of the chart, for light and dark pages.
const char* roofline_style();

/// "801 TFLOP/s", "2.13 Pop/s".
std::string rate_text(double rate, std::string_view unit);

/// Letter that distinguishes runs of the same steps: "A".
std::string roofline_run(std::size_t file);

/// Adds a step to `markers`. Steps at the same position share a marker; measurements of two runs do
/// not.
void mark(std::vector<Marker>& markers, double x, double y, bool filled, const Point&, double rate);

/// The label: "v1, v2: 346 to 349 TFLOP/s", "v1 A, v1 B: at most 494 TFLOP/s".
std::string text(const Marker&, bool several_runs);

/// Whether there are few labels, all inside `plot`, none of which covers another or an obstacle.
bool readable(const std::vector<Label>&, const Box& plot, const std::vector<Box>& obstacles);

/// Breaks a text at blanks into lines of at most `most` characters; later lines are indented.
std::vector<std::string> wrapped(std::string text, std::size_t most);

/// The end of `text`, after "..." if it is longer than `most` characters.
std::string tail(const std::string& text, std::size_t most);

}  // namespace attn::report
