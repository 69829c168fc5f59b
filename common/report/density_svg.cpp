#include "report/density_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "attn/error.h"
#include "report/markup.h"

namespace attn::report {
namespace {

constexpr double kWidth = 720, kHeight = 560;
constexpr double kLeft = 84, kTop = 76, kRight = 680, kBottom = 484;  // the plot area
constexpr const char* kStyle = R"(  <style>
    .bg { fill: #ffffff; stroke: #d9dfe5; } .axis { stroke: #8496a9; fill: none; }
    text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
           fill: #1d2530; }
    .t { font-size: 16px; font-weight: 600; } .s { fill: #56616f; }
    .c { text-anchor: middle; } .e { text-anchor: end; }
    .grid { stroke: #e8edf2; } .ideal { stroke: #8496a9; stroke-dasharray: 7 5; }
    .k0 { stroke: #0b5cad; fill: #0b5cad; } .k1 { stroke: #b5562a; fill: #b5562a; }
    .k2 { stroke: #3d8a54; fill: #3d8a54; }
    .r0 { fill: #0b5cad; } .r1 { fill: #b5562a; } .r2 { fill: #3d8a54; }
    .curve { fill: none; stroke-width: 2; }
    @media (prefers-color-scheme: dark) {
      .bg { fill: #1b2027; stroke: #323a44; } .axis { stroke: #6d7f92; }
      text { fill: #dfe5ec; } .s { fill: #a9b4c0; } .grid { stroke: #2a323b; }
      .ideal { stroke: #6d7f92; } .k0 { stroke: #6cb4ff; fill: #6cb4ff; }
      .k1 { stroke: #e39a70; fill: #e39a70; } .k2 { stroke: #7cc592; fill: #7cc592; }
      .r0 { fill: #6cb4ff; } .r1 { fill: #e39a70; } .r2 { fill: #7cc592; }
      .curve { fill: none; }
    }
  </style>
)";

struct Point {
  double work = 0, seconds = 0;  // FLOP; median
};
using Curves = std::map<int64_t, std::vector<Point>>;  // by head dim; points sorted by density

Curves curves_of(const std::vector<ResultFile>& files) {
  if (files.empty()) throw InputError("density: RESULTS is required");
  Curves curves;
  const std::string* step = nullptr;
  for (const ResultFile& f : files) {
    const std::string path = f.path.string();
    if (f.gpu != files[0].gpu || f.operation != files[0].operation)
      throw InputError(fmt::format("{}: {} on {}, not {} on {}", path, f.operation, f.gpu,
                                   files[0].operation, files[0].gpu));
    if (f.steps.size() != 1)
      throw InputError(fmt::format("{}: {} steps, must be of one", path, f.steps.size()));
    const StepRow& s = f.steps[0];
    if (step == nullptr) step = &s.name;
    if (s.name != *step) throw InputError(fmt::format("{}: {}, not {}", path, s.name, *step));
    if (!s.median_s || !(s.flop > 0)) throw InputError(path + ": has no time, or no operations");
    curves[f.problem.head_dim].push_back({s.flop, *s.median_s});
  }
  if (curves.size() > 3) throw InputError("density: at most 3 head dims have a colour");
  for (auto& [d, points] : curves) {
    if (points.size() < 2)
      throw InputError(fmt::format("density: one file with d={}, must be two or more", d));
    std::sort(points.begin(), points.end(), [](auto& a, auto& b) { return a.work < b.work; });
  }
  return curves;
}

double px(double share) { return kLeft + (kRight - kLeft) * share; }
double py(double share) { return kBottom - (kBottom - kTop) * share; }

}  // namespace

std::string density_svg(const std::vector<ResultFile>& files) {
  const Curves curves = curves_of(files);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" role=\"img\" aria-labelledby=\"density-t density-d\">\n"
      "  <title id=\"density-t\">Time over density of {2}</title>\n"
      "  <desc id=\"density-d\">Time of {2} over the share of scores that its mask leaves, both as "
      "shares of the densest run, on {3}. On the diagonal time is in proportion.</desc>\n{4}",
      kWidth, kHeight, escaped(files[0].steps[0].name), escaped(files[0].gpu), kStyle);
  const auto add = [&]<class... T>(fmt::format_string<T...> text, T&&... values) {
    svg += "  " + fmt::format(text, std::forward<T>(values)...) + "\n";
  };
  add("<rect class=\"bg\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"6\"/>", kWidth - 1,
      kHeight - 1);
  add("<text class=\"t\" x=\"24\" y=\"32\">{}: time over density, {}</text>",
      escaped(files[0].steps[0].name), escaped(files[0].gpu));
  add("<text class=\"s\" x=\"24\" y=\"54\">right of a point, in its colour: its rate, in % of that "
      "of the densest run</text>");
  for (int i = 0; i <= 4; ++i) {
    const double share = i / 4.0;
    add("<line class=\"grid\" x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{0:.1f}\" y2=\"{2}\"/>", px(share),
        kTop, kBottom);
    add("<line class=\"grid\" x1=\"{1}\" y1=\"{0:.1f}\" x2=\"{2}\" y2=\"{0:.1f}\"/>", py(share),
        kLeft, kRight);
    add("<text class=\"s c\" x=\"{:.1f}\" y=\"{}\">{} %</text>", px(share), kBottom + 20, 25 * i);
    add("<text class=\"s e\" x=\"{}\" y=\"{:.1f}\">{} %</text>", kLeft - 8, py(share) + 4, 25 * i);
  }
  add("<line class=\"ideal\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>", px(0),
      py(0), px(1), py(1));
  add("<path class=\"axis\" d=\"M{0} {1} V{2} H{3}\"/>", kLeft, kTop, kBottom, kRight);
  add("<text class=\"c\" x=\"{:.1f}\" y=\"{}\">scores that the mask leaves</text>", px(0.5),
      kBottom + 46);
  add("<text class=\"c\" transform=\"translate(22 {:.1f}) rotate(-90)\">time</text>", py(0.5));
  int n = 0;
  for (const auto& [d, points] : curves) {
    const Point& all = points.back();
    std::string path;
    for (const Point& p : points)
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : " L", px(p.work / all.work),
                          py(p.seconds / all.seconds));
    add("<path class=\"curve k{}\" d=\"{}\"/>", n, path);
    for (const Point& p : points)
      add("<circle class=\"k{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\"/>", n, px(p.work / all.work),
          py(p.seconds / all.seconds));
    // Rates are listed in one column per curve, right of the points where the curves are closest.
    for (const Point& p : points) {
      if (&p == &all) continue;
      const double rate = (p.work / p.seconds) / (all.work / all.seconds);
      add("<text class=\"r{}\" x=\"{:.1f}\" y=\"{:.1f}\">{:.0f}</text>", n,
          px(p.work / all.work) + 12 + 24 * n, py(p.seconds / all.seconds) + 18, 100 * rate);
    }
    const double y = kTop + 24 + 22 * n;
    add("<line class=\"k{}\" x1=\"{}\" y1=\"{:.1f}\" x2=\"{}\" y2=\"{:.1f}\" stroke-width=\"2\"/>",
        n, kLeft + 20, y - 4, kLeft + 48, y - 4);
    add("<text x=\"{}\" y=\"{:.1f}\">d={}, {:.3f} ms in full</text>", kLeft + 56, y, d,
        1e3 * all.seconds);
    ++n;
  }
  return svg + "</svg>\n";
}

}  // namespace attn::report
