#include "report/climb_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "attn/error.h"
#include "report/containers.h"
#include "report/markup.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

using nlohmann::json;

constexpr double kWidth = 960, kHeight = 470;
constexpr double kLeft = 64, kTop = 84, kRight = 790, kBottom = 386;  // the plot area
constexpr std::size_t kColours = 4;
constexpr const char* kStyle = R"(  <style>
    .bg { fill: #ffffff; stroke: #d9dfe5; } .axis { stroke: #8496a9; fill: none; }
    text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
           fill: #1d2530; }
    .t { font-size: 16px; font-weight: 600; } .s { fill: #56616f; } .n { font-size: 10px; }
    .c { text-anchor: middle; } .e { text-anchor: end; }
    .grid { stroke: #e8edf2; } .peer { stroke: #56616f; stroke-dasharray: 6 4; }
    .k0 { stroke: #b5562a; fill: #b5562a; } .k1 { stroke: #8a6d1d; fill: #8a6d1d; }
    .k2 { stroke: #3d8a54; fill: #3d8a54; } .k3 { stroke: #0b5cad; fill: #0b5cad; }
    .r0 { fill: #9c4420; } .r1 { fill: #705811; } .r2 { fill: #2c6e40; } .r3 { fill: #0b5cad; }
    .curve { fill: none; stroke-width: 2; }
    @media (prefers-color-scheme: dark) {
      .bg { fill: #1b2027; stroke: #323a44; } .axis { stroke: #6d7f92; }
      text { fill: #dfe5ec; } .s { fill: #a9b4c0; } .grid { stroke: #2a323b; }
      .peer { stroke: #a9b4c0; }
      .k0 { stroke: #e39a70; fill: #e39a70; } .k1 { stroke: #d9bd63; fill: #d9bd63; }
      .k2 { stroke: #7cc592; fill: #7cc592; } .k3 { stroke: #6cb4ff; fill: #6cb4ff; }
      .r0 { fill: #f0b491; } .r1 { fill: #e6d08a; } .r2 { fill: #97d8aa; } .r3 { fill: #6cb4ff; }
      .curve { fill: none; }
    }
  </style>
)";

struct Point {
  std::string step;
  double rate;  // FLOP/s
};

std::vector<Point> points_of(const ResultFile& file) {
  std::vector<Point> points;
  for (const StepRow& s : file.steps)
    if (s.median_s && s.flop > 0) points.push_back({s.name, s.flop / *s.median_s});
  if (points.empty()) throw InputError(file.path.string() + ": no step has a time");
  return points;
}

// "12" of "v12_lazy_rescale".
std::string number_of(const std::string& step) { return step.substr(1, step.find('_') - 1); }

bool same_problem(const json& p, const Problem& problem) {
  return p.value("batch", int64_t{0}) == problem.batch &&
         p.value("heads", int64_t{0}) == problem.heads &&
         p.value("kv_heads", int64_t{0}) == problem.kv_heads &&
         p.value("seqlen_q", int64_t{0}) == problem.seqlen_q &&
         p.value("seqlen_k", int64_t{0}) == problem.seqlen_k &&
         p.value("head_dim", int64_t{0}) == problem.head_dim &&
         p.value("causal", false) == problem.causal;
}

}  // namespace

ClimbLine read_climb_line(const std::string& text, const ResultFile& run) {
  const auto equals = text.find('='), colon = text.rfind(':');
  if (equals == text.npos || colon == text.npos || colon < equals)
    throw InputError(fmt::format("--line {}: must be NAME=FILE:PEER", text));
  const std::string name = text.substr(0, equals), peer = text.substr(colon + 1);
  const std::filesystem::path path = text.substr(equals + 1, colon - equals - 1) + ".json";
  const json document = read_json(path);
  const double flop = run.steps.empty() ? 0 : run.steps[0].flop;
  for (const json& p : document.value("problems", json::array())) {
    if (!p.is_object() || !same_problem(p.at("problem"), run.problem)) continue;
    for (const json& found : p.at("peers"))
      if (found.at("name") == peer)
        return {name, flop / found.at("time").at("median_s").get<double>()};
  }
  // Third-party files name problems like "fwd d128c n4096": 16384 tokens, 2048 / d heads.
  const Problem& q = run.problem;
  if (q.batch * q.seqlen_k == 16384 && q.heads * q.head_dim == 2048 && q.heads == q.kv_heads)
    for (const json& row : document.value("rows", json::array())) {
      std::string words;
      for (const char c : row.at("name").get<std::string>())
        if (c != ' ' || (!words.empty() && words.back() != ' ')) words += c;
      if (words == fmt::format("fwd d{}{} n{}", q.head_dim, q.causal ? "c" : "", q.seqlen_k) &&
          row.at("rate").contains(peer))
        return {name, 1e12 * row.at("rate").at(peer).get<double>()};
    }
  throw InputError(fmt::format("--line {}: {} has no {} on {}", text, path.string(), peer,
                               problem_text(run)));
}

std::string climb_svg(const std::vector<ResultFile>& files, const std::vector<ClimbLine>& lines) {
  if (files.empty()) throw InputError("climb: RESULTS is required");
  std::vector<std::vector<Point>> chapters;
  std::size_t count = 0;
  double least = INFINITY, most = 0;
  for (const ResultFile& f : files) {
    if (f.gpu != files[0].gpu || f.operation != files[0].operation ||
        problem_text(f) != problem_text(files[0]))
      throw InputError(fmt::format("{}: {} {} on {}, not {} {} on {}", f.path.string(),
                                   f.operation, problem_text(f), f.gpu, files[0].operation,
                                   problem_text(files[0]), files[0].gpu));
    chapters.push_back(points_of(f));
    count += chapters.back().size();
    for (const Point& p : chapters.back())
      least = std::min(least, p.rate), most = std::max(most, p.rate);
  }
  for (const ClimbLine& l : lines) most = std::max(most, l.flop_per_s);
  const double low = std::floor(std::log10(least)), high = std::ceil(std::log10(most));
  const auto py = [&](double rate) {
    return kBottom - (kBottom - kTop) * (std::log10(rate) - low) / std::max(1.0, high - low);
  };
  const auto px = [&](double n) { return kLeft + (kRight - kLeft) * (n + 0.5) / double(count); };
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" role=\"img\" aria-labelledby=\"climb-t climb-d\">\n"
      "  <title id=\"climb-t\">TFLOP/s of every {2} step</title>\n"
      "  <desc id=\"climb-d\">From {3:.2f} TFLOP/s of {4} to {5:.0f} of {6}, on {7}, {8}.</desc>\n"
      "{9}",
      kWidth, kHeight, escaped(files[0].operation), chapters[0][0].rate * 1e-12,
      escaped(chapters[0][0].step), chapters.back().back().rate * 1e-12,
      escaped(chapters.back().back().step), escaped(files[0].gpu),
      escaped(problem_text(files[0])), kStyle);
  const auto add = [&]<class... T>(fmt::format_string<T...> text, T&&... values) {
    svg += "  " + fmt::format(text, std::forward<T>(values)...) + "\n";
  };
  add("<rect class=\"bg\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"6\"/>", kWidth - 1,
      kHeight - 1);
  add("<text class=\"t\" x=\"24\" y=\"32\">Every {} step on one problem: TFLOP/s, {}</text>",
      escaped(files[0].operation), escaped(files[0].gpu));
  add("<text class=\"s\" x=\"24\" y=\"52\">{}; logarithmic axis</text>",
      escaped(problem_text(files[0])));
  add("<text class=\"s\" x=\"24\" y=\"69\">dashed: libraries, measured in a run of their "
      "own</text>");
  for (double e = low; e <= high; ++e) {
    const double rate = std::pow(10, e);
    add("<line class=\"grid\" x1=\"{1}\" y1=\"{0:.1f}\" x2=\"{2}\" y2=\"{0:.1f}\"/>", py(rate),
        kLeft, kRight);
    add("<text class=\"s e\" x=\"{}\" y=\"{:.1f}\">{:g}</text>", kLeft - 8, py(rate) + 4,
        rate * 1e-12);
  }
  add("<path class=\"axis\" d=\"M{0} {1} V{2} H{3}\"/>", kLeft, kTop, kBottom, kRight);
  // Libraries, fastest first, with labels that do not overlap.
  std::vector<ClimbLine> sorted = lines;
  std::ranges::sort(sorted, std::greater<>(), &ClimbLine::flop_per_s);
  double label = 0;
  for (const ClimbLine& l : sorted) {
    add("<line class=\"peer\" x1=\"{1}\" y1=\"{0:.1f}\" x2=\"{2}\" y2=\"{0:.1f}\"/>",
        py(l.flop_per_s), kLeft, kRight);
    label = std::max(label + 16, py(l.flop_per_s) + 4);
    add("<text x=\"{}\" y=\"{:.1f}\">{} {:.0f}</text>", kRight + 8, label, escaped(l.name),
        l.flop_per_s * 1e-12);
  }
  double n = 0;
  for (std::size_t c = 0; c < chapters.size(); ++c) {
    const std::size_t colour = c % kColours;
    std::string path;
    const double first = n;
    for (const Point& p : chapters[c]) {
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : " L", px(n), py(p.rate));
      add("<circle class=\"k{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\"><title>{}: {:.3g} "
          "TFLOP/s</title></circle>",
          colour, px(n), py(p.rate), escaped(p.step), p.rate * 1e-12);
      add("<text class=\"n c r{}\" x=\"{:.1f}\" y=\"{}\">{}</text>", colour, px(n), kBottom + 16,
          escaped(number_of(p.step)));
      ++n;
    }
    add("<path class=\"curve k{}\" d=\"{}\"/>", colour, path);
    add("<text class=\"c r{}\" x=\"{:.1f}\" y=\"{}\">{}</text>", colour, px((first + n - 1) / 2),
        kBottom + 40, escaped(files[c].chapter));
    const Point& last = chapters[c].back();
    add("<text class=\"e r{}\" x=\"{:.1f}\" y=\"{:.1f}\">{:.3g}</text>", colour, px(n - 1) + 4,
        py(last.rate) - 9, last.rate * 1e-12);
  }
  return svg + "</svg>\n";
}

}  // namespace attn::report
