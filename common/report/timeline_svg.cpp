#include "report/timeline_svg.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "attn/error.h"
#include "emulator/trace.h"
#include "report/markup.h"
#include "report/timeline.h"

namespace attn::report {
namespace {

constexpr double kWidth = 880, kLeft = 140, kRight = 856;  // of the picture, of its time
constexpr double kRow = 20, kGap = 5, kHead = 46, kPanel = 28, kAxis = 22, kFoot = 30;
constexpr double kNanosecond = 0.0015;  // what rounding of a file's times may add up to
constexpr double kCharacter = 7;  // of a label, on average
constexpr double kLeastUs = 0.01, kMostUs = 1e6;  // of a window
constexpr std::size_t kWarps = 4;                 // of a warpgroup

// A colour per warpgroup; `n`: no warpgroup. Waits and flights have the same colours, pale.
constexpr const char* kStyle = R"(  <style>
    .bg { fill: #ffffff; stroke: #d9dfe5; } .axis { stroke: #8496a9; } .grid { stroke: #e3e8ee; }
    text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
           fill: #1d2530; }
    .t { font-size: 15px; font-weight: 600; } .b { font-size: 13px; font-weight: 600; }
    .s { fill: #56616f; } .c { text-anchor: middle; } .e { text-anchor: end; }
    .g0 { fill: #a9cdf2; stroke: #0b5cad; } .g1 { fill: #f6c39f; stroke: #b5562a; }
    .g2 { fill: #d9c4f0; stroke: #6f42b5; } .n { fill: #bfe3c8; stroke: #3d8a54; }
    .g0.p { fill: #eaf3fc; stroke: #85aed6; } .g1.p { fill: #fdf0e7; stroke: #daaa94; }
    .g2.p { fill: #f5f0fb; stroke: #b7a0da; } .n.p { fill: #eff8f1; stroke: #9ec4a9; }
    @media (prefers-color-scheme: dark) {
      .bg { fill: #1b2027; stroke: #323a44; } .axis { stroke: #6d7f92; } .grid { stroke: #2a323b; }
      text { fill: #dfe5ec; } .s { fill: #a9b4c0; }
      .g0 { fill: #1d4a78; stroke: #6cb4ff; } .g1 { fill: #713d21; stroke: #e39a70; }
      .g2 { fill: #4b3272; stroke: #b996ee; } .n { fill: #23492f; stroke: #7cc592; }
      .g0.p { fill: #1b2b3d; stroke: #436a92; } .g1.p { fill: #31271f; stroke: #7f5d4b; }
      .g2.p { fill: #272433; stroke: #6a5a8a; } .n.p { fill: #1d2b2a; stroke: #4b7358; }
    }
  </style>
)";

using Track = TimelineEvents::Track;

struct Box {
  double begin, end;
  std::string label, colour;
  bool pale, nests;  // in others of its lane; else it only lies below those that it overlaps
};
struct Lane {
  std::string label;
  std::vector<Box> boxes;
  double begin = 0, end = 0;  // of a warp
  std::vector<std::size_t> rows;  // of each box
  std::size_t height = 1;
};
struct Panel {
  TimelineSummary summary;
  TimelineEvents events;
  double from = 0;
  std::vector<Lane> lanes;
};

std::string colour(std::size_t warpgroup) { return fmt::format("g{}", warpgroup % 3); }
// Of "warpgroup 1" or "wgmma of warpgroup 1"; others have none.
std::string colour(const std::string& name) {
  const std::string word = "warpgroup ";
  const auto at = name.find(word);
  return at == name.npos ? "n" : colour(std::size_t(name[at + word.size()] - '0'));
}

std::string warp_name(const Track& track) { return fmt::format("warp {}", track.second - 1); }

bool lists(const std::string& tiles, const std::string& tile) {
  return (", " + tiles + ",").find(", " + tile + ",") != tiles.npos;
}

// The last tile that the MMAs read which the tensor core works on, or nothing.
std::string tile_of(const TimelineEvents::Span& unit,
                    const std::vector<TimelineEvents::Flight>& flights) {
  for (const auto& f : flights)  // the first that ends
    if (f.source == unit.source && f.name.ends_with(unit.name) &&
        f.begin <= unit.begin + kNanosecond && f.end >= unit.end - kNanosecond)
      return f.reads.substr(f.reads.rfind(' ') + 1);
  return "";
}

// What the lane of this name shows: a unit, a warp, "smem TILE", or flights such as "cp.async of
// warp 0". No boxes if the block has none.
std::vector<Box> boxes_of(const TimelineEvents& e, std::size_t block, const std::string& name) {
  std::vector<Box> boxes;
  const auto flights = e.flights.find(block);
  static const std::vector<TimelineEvents::Flight> none;
  const auto& in_flight = flights == e.flights.end() ? none : flights->second;
  for (const auto& [track, spans] : e.units)
    if (track.first == block && unit_name(track.second) == name)
      for (const auto& s : spans) {
        const bool tensor = track.second == emulator::kTensorTrack;
        const std::string of = colour(s.name);
        boxes.push_back({s.begin, s.end, tensor ? tile_of(s, in_flight) : of == "n" ? s.name : "",
                         of, false, true});
      }
  for (const auto* kind : {&e.marks, &e.waits})
    for (const auto& [track, spans] : *kind)
      if (track.first == block && warp_name(track) == name)
        for (const auto& s : spans)
          boxes.push_back({s.begin, s.end, s.name, colour((track.second - 1) / kWarps),
                           kind == &e.waits, true});
  const std::string smem = "smem ";
  for (const auto& f : in_flight)
    if (f.name.substr(0, f.name.find(',')) == name)  // without "at most"
      boxes.push_back({f.begin, f.end, f.writes, "n", true, false});
    else if (name.starts_with(smem) && lists(f.writes, name.substr(smem.size())))
      boxes.push_back({f.begin, f.end, "copy", "n", true, false});
    else if (name.starts_with(smem) && lists(f.reads, name.substr(smem.size())))
      boxes.push_back({f.begin, f.end, "read", colour(f.name), false, false});
  return boxes;
}

// As on the page of --timeline: spans inside others below them, flights that overlap too.
void assign_rows(Lane& lane) {
  std::ranges::stable_sort(lane.boxes, [](const Box& a, const Box& b) {
    return std::pair(a.begin, -a.end) < std::pair(b.begin, -b.end);
  });
  std::vector<double> ends;
  for (const Box& b : lane.boxes) {
    std::size_t row = 0;
    const auto ended = [&](double end) { return end <= b.begin + kNanosecond; };
    if (b.nests)
      while (!ends.empty() && ended(ends.back())) ends.pop_back();
    for (row = b.nests ? ends.size() : 0; row < ends.size() && !ended(ends[row]);) ++row;
    ends.resize(std::max(ends.size(), row + 1));
    ends[row] = b.end;
    lane.rows.push_back(row);
    lane.height = std::max(lane.height, row + 1);
  }
}

std::vector<std::string> default_lanes(const TimelineEvents& e, std::size_t block) {
  std::vector<std::string> names;
  std::set<std::size_t> tracks;
  for (const auto& [track, spans] : e.units)
    if (track.first == block) names.push_back(unit_name(track.second));
  for (const auto* kind : {&e.marks, &e.waits})
    for (const auto& [track, spans] : *kind)
      if (track.first == block && (track.second - 1) % kWarps == 0) tracks.insert(track.second);
  for (const std::size_t t : tracks) names.push_back(warp_name({block, t}));
  return names;
}

std::vector<Panel> read(const std::vector<std::string>& files, TimelinePicture& picture) {
  std::vector<Panel> panels(files.size());
  std::set<std::string> found;
  for (std::size_t n = 0; n < files.size(); ++n) {
    Panel& p = panels[n];
    p.summary = read_timeline(files[n], &p.events);
    if (!picture.from.empty()) p.from = picture.from[picture.from.size() == 1 ? 0 : n];
    if (!(p.from >= 0)) throw InputError(fmt::format("--from {}: must be from 0", p.from));
    if (!(p.from < p.events.end))
      throw InputError(fmt::format("--from {}: {} ends at {:.1f} us", p.from, files[n],
                                   p.events.end));
    for (const std::size_t block : picture.blocks) {
      if (!p.events.begins.contains(block + 1))
        throw InputError(fmt::format("--block {}: {} has {} block(s), from 0 on", block, files[n],
                                     p.summary.blocks));
      for (const std::string& lane :
           picture.lanes.empty() ? default_lanes(p.events, block + 1) : picture.lanes) {
        const auto equals = lane.find('=');
        const std::string name = lane.substr(0, equals);
        std::string label = equals == lane.npos ? name : lane.substr(equals + 1);
        if (picture.blocks.size() > 1)
          label = fmt::format("block {}{}{}", block, label.empty() ? "" : ", ", label);
        p.lanes.push_back({label, boxes_of(p.events, block + 1, name), 0, 0, {}});
        for (const auto& [track, end] : p.events.ends)
          if (track.first == block + 1 && warp_name(track) == name)
            p.lanes.back().begin = p.events.begins.at(block + 1), p.lanes.back().end = end;
        if (p.lanes.back().boxes.empty())
          p.lanes.pop_back();
        else
          found.insert(name);
      }
    }
  }
  for (const std::string& lane : picture.lanes)
    if (const std::string name = lane.substr(0, lane.find('=')); !found.contains(name))
      throw InputError(fmt::format("--lanes {}: the file has nothing of that name", name));
  if (picture.us == 0)
    for (const Panel& p : panels) picture.us = std::max(picture.us, p.events.end - p.from);
  for (Panel& p : panels)
    for (Lane& lane : p.lanes) {
      std::erase_if(lane.boxes, [&](const Box& b) {
        return b.end <= p.from || b.begin >= p.from + picture.us;
      });
      assign_rows(lane);
    }
  return panels;
}

double height(const Panel& p) {
  double height = kPanel;
  for (const Lane& lane : p.lanes) height += kRow * double(lane.height) + kGap;
  return height;
}

// A tick every 1, 2 or 5 times a power of ten: at most twelve.
double tick_of(double us) {
  const double power = std::pow(10, std::floor(std::log10(us / 12)));
  for (const double n : {1, 2, 5})
    if (us / (n * power) <= 12) return n * power;
  return 10 * power;
}

}  // namespace

std::string timeline_svg(const std::vector<std::string>& files, const TimelinePicture& wanted) {
  TimelinePicture picture = wanted;
  if (picture.from.size() > 1 && picture.from.size() != files.size())
    throw InputError(fmt::format("--from: {} times for {} files", picture.from.size(),
                                 files.size()));
  if (picture.us != 0 && !(picture.us >= kLeastUs && picture.us <= kMostUs))
    throw InputError(fmt::format("--us {}: must be from {} to {}, or 0: all", picture.us, kLeastUs,
                                 kMostUs));
  const std::vector<Panel> panels = read(files, picture);
  // One axis below all, unless their windows begin at different times.
  const bool one_axis = std::ranges::all_of(
      panels, [&](const Panel& p) { return p.from == panels[0].from; });
  double bottom = kHead + kFoot + kAxis * double(one_axis ? 1 : panels.size());
  for (const Panel& p : panels) bottom += height(p);
  std::vector<std::string> steps;
  for (const Panel& p : panels) steps.push_back(p.summary.step);
  const std::string title = escaped(
      picture.title.empty() ? fmt::format("{}: {}", panels[0].summary.chapter,
                                          fmt::join(steps, ", "))
                            : picture.title);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" role=\"img\" aria-labelledby=\"t\">\n  <title id=\"t\">{2}</title>\n{3}",
      kWidth, bottom, title, kStyle);
  const auto add = [&]<class... T>(fmt::format_string<T...> text, T&&... values) {
    svg += "  " + fmt::format(text, std::forward<T>(values)...) + "\n";
  };
  add("<rect class=\"bg\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"6\"/>", kWidth - 1,
      bottom - 1);
  add("<text class=\"t\" x=\"16\" y=\"28\">{}</text>", title);
  const double tick = tick_of(picture.us);
  const int digits = std::max(0, -int(std::floor(std::log10(tick) + 1e-9)));
  double y = kHead;
  for (std::size_t n = 0; n < panels.size(); ++n) {
    const Panel& p = panels[n];
    const auto px = [&](double us) {
      return kLeft + (kRight - kLeft) * std::clamp((us - p.from) / picture.us, 0.0, 1.0);
    };
    const double end = y + height(p);
    add("<text class=\"b\" x=\"16\" y=\"{}\">{}</text>", y + 15, escaped(p.summary.step));
    add("<text class=\"s e\" x=\"{}\" y=\"{}\">{}</text>", kRight, y + 15,
        p.summary.gpu.empty()
            ? "a model of an H100 or H200, not a measurement"
            : "recorded on " + escaped(p.summary.gpu) +
                  (p.summary.warning.empty() ? "" : ". " + escaped(p.summary.warning)));
    const bool labels = !one_axis || n + 1 == panels.size();
    for (auto at = int(std::ceil(p.from / tick - 1e-6)); at * tick <= p.from + picture.us + 1e-6;
         ++at) {
      const double x = px(at * tick);
      add("<line class=\"grid\" x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{0:.1f}\" y2=\"{2}\"/>", x,
          y + kPanel - kGap, end);
      if (labels)
        add("<text class=\"s c\" x=\"{:.1f}\" y=\"{}\">{:.{}f}</text>", x, end + 15, at * tick,
            digits);
    }
    y += kPanel;
    for (const Lane& lane : p.lanes) {
      add("<text class=\"e\" x=\"{}\" y=\"{}\">{}</text>", kLeft - 8, y + 14, escaped(lane.label));
      if (px(lane.end) > px(lane.begin))
        add("<line class=\"axis\" x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{2:.1f}\" y2=\"{1}\"/>",
            px(lane.begin), y + kRow / 2 - 0.5, px(lane.end));
      for (std::size_t i = 0; i < lane.boxes.size(); ++i) {
        const Box& b = lane.boxes[i];
        const double x = px(b.begin), width = std::max(0.8, px(b.end) - x);
        const double top = y + kRow * double(lane.rows[i]);
        add("<rect class=\"{}{}\" x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\"/>", b.colour,
            b.pale ? " p" : "", x, top + 0.5, width, kRow - 2);
        if (kCharacter * double(b.label.size()) + 4 <= width)
          add("<text class=\"c\" x=\"{:.1f}\" y=\"{}\">{}</text>", x + width / 2, top + 14,
              escaped(b.label));
      }
      y += kRow * double(lane.height) + kGap;
    }
    add("<line class=\"axis\" x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\"/>", kLeft, y, kRight, y);
    if (labels) {
      add("<text class=\"s e\" x=\"{}\" y=\"{}\">us</text>", kLeft - 22, y + 15);
      y += kAxis;
    }
  }
  add("<text class=\"s\" x=\"16\" y=\"{}\">Pale: waits, and work in flight. {}</text>", y + 20,
      escaped(panels[0].summary.problem));
  return svg + "</svg>\n";
}

}  // namespace attn::report
