#include "report/roofline_marks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "report/short_list.h"

namespace attn::report {
namespace {

constexpr std::size_t kMaxLabels = 16;  // more are numbered, with a key below

// The colours of the figures in docs/figures.
constexpr const char* kStyle = R"(  <style>
    .bg { fill: #ffffff; stroke: #d9dfe5; } .plot { fill: none; stroke: #8496a9; }
    text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
           fill: #1d2530; }
    .t { font-size: 16px; font-weight: 600; } .s { fill: #56616f; }
    .c { text-anchor: middle; } .e { text-anchor: end; }
    .halo { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round; }
    .grid { stroke: #e8edf2; } .roof { stroke: #0b5cad; stroke-width: 2.5; fill: none; }
    .dash { stroke-dasharray: 7 5; }
    .rt { fill: #0b5cad; } .gap { stroke: #8496a9; stroke-dasharray: 2 4; }
    .leader { stroke: #a9b4c0; }
    .arrow { stroke: #3d8a54; stroke-width: 2; fill: none; } .head { fill: #3d8a54; }
    .hollow { fill: #ffffff; stroke: #b5562a; stroke-width: 2; }
    .filled { fill: #b5562a; stroke: #ffffff; stroke-width: 1; }
    @media (prefers-color-scheme: dark) {
      .bg { fill: #1b2027; stroke: #323a44; } .plot { stroke: #6d7f92; }
      text { fill: #dfe5ec; } .s { fill: #a9b4c0; }
      .halo { stroke: #1b2027; } .grid { stroke: #2a323b; } .roof { stroke: #6cb4ff; }
      .rt { fill: #6cb4ff; }
      .gap { stroke: #6d7f92; } .leader { stroke: #56616f; } .arrow { stroke: #7cc592; }
      .head { fill: #7cc592; }
      .hollow { fill: #1b2027; stroke: #e39a70; } .filled { fill: #e39a70; stroke: #1b2027; }
    }
  </style>
)";

}  // namespace

const char* roofline_style() { return kStyle; }

// "801 TFLOP/s", "2.13 Pop/s".
std::string rate_text(double rate, std::string_view unit) {
  double scaled = rate;
  std::string prefix;
  for (const char* next : {"k", "M", "G", "T", "P"})
    if (scaled >= 999.5) scaled /= 1000, prefix = next;
  return fmt::format("{:.{}f} {}{}", scaled, scaled < 10 ? 2 : scaled < 100 ? 1 : 0, prefix, unit);
}

std::string roofline_run(std::size_t n) {
  return n < 26 ? std::string(1, static_cast<char>('A' + n)) : std::to_string(n + 1);
}

// "v1, v2: 346 to 349 TFLOP/s"
std::string text(const Marker& m, bool several_runs) {
  std::string all;
  for (const auto& [file, names] : m.names)
    all += fmt::format("{}{}{}", all.empty() ? "" : ", ", short_list(names),
                       several_runs ? " " + roofline_run(file) : "");
  const std::string least = rate_text(m.least, "FLOP/s"), most = rate_text(m.most, "FLOP/s");
  if (!m.filled) return fmt::format("{}: at most {}", all, most);
  if (least == most) return fmt::format("{}: {}", all, most);
  const auto blank = least.find(' ');
  const bool one_unit = most.ends_with(least.substr(blank));
  return fmt::format("{}: {} to {}", all, one_unit ? least.substr(0, blank) : least, most);
}

// Steps at the same position share a marker and a label; measurements of two runs do not.
void mark(std::vector<Marker>& markers, double x, double y, bool filled, const Point& p,
          double rate) {
  for (Marker& m : markers)
    if (m.filled == filled && std::hypot(m.x - x, m.y - y) < 1.5 &&
        (!filled || m.names.contains(p.file))) {
      m.names[p.file].push_back(p.name);
      m.least = std::min(m.least, rate), m.most = std::max(m.most, rate);
      return;
    }
  markers.push_back({x, y, {{p.file, {p.name}}}, rate, rate, filled});
}

// Few labels, none of which covers another label, a marker or a roof's label.
bool readable(const std::vector<Label>& labels, const Box& plot,
              const std::vector<Box>& obstacles) {
  if (labels.size() > kMaxLabels) return false;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (labels[i].box.left < plot.left || labels[i].box.right > plot.right) return false;
    for (const Box& o : obstacles)
      if (overlap(labels[i].box, o)) return false;
    for (std::size_t j = 0; j < i; ++j)
      if (overlap(labels[i].box, labels[j].box)) return false;
  }
  return true;
}

// Breaks a text at blanks into lines of at most `most` characters; later lines are indented.
std::vector<std::string> wrapped(std::string text, std::size_t most) {
  std::vector<std::string> lines;
  while (text.size() > most) {
    const std::size_t blank = text.rfind(' ', most);
    if (blank == text.npos || blank < 8) break;
    lines.push_back(text.substr(0, blank));
    text = "    " + text.substr(blank + 1);
  }
  lines.push_back(text);
  return lines;
}

std::string tail(const std::string& text, std::size_t most) {
  return text.size() <= most ? text : "..." + text.substr(text.size() - most + 3);
}

}  // namespace attn::report
