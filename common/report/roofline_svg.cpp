#include "report/roofline_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>

#include "attn/error.h"
#include "report/json_object.h"
#include "report/markup.h"
#include "report/roofline_marks.h"

namespace attn::report {
namespace {

constexpr double kWidth = 960, kHeight = 640;
constexpr Box kPlot{96, 92, 936, 572};
constexpr double kCharacter = 7.3;  // average width in the 13 pixel font

struct FlatRoof {
  double rate;
  std::string label;
  bool dashed;
};

class Picture {
 public:
  Picture(const std::vector<ResultFile>& files, const std::string& id) : files_(files), id_(id) {
    check_files();
    collect_points();
    collect_roofs();
    choose_range();
  }

  RooflineSvg draw() {
    grid();
    draw_roofs();
    draw_points();
    const std::string body = std::move(out_.text);
    head();  // its height depends on the key
    out_.text += body + "</svg>\n";
    return std::move(out_);
  }

 private:
  template <class... Arguments>
  void add(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    out_.text += "  " + fmt::format(format, std::forward<Arguments>(arguments)...) + "\n";
  }

  void check_files() const {
    if (files_.empty()) throw InputError("roofline: no results");
    const ResultFile& first = files_.front();
    for (const ResultFile& f : files_) {
      const auto same = [&](std::string_view what, const std::string& a, const std::string& b) {
        if (a != b)
          throw InputError(
              fmt::format("{}: another {} than {}: '{}', not '{}' (accepted: results of "
                          "one problem on one GPU)",
                          printable(f.path.string()), what, printable(first.path.string()), b, a));
      };
      same("GPU of the roofs", first.roofs_of, f.roofs_of);
      same("element type", std::string(name(first.problem.dtype)),
           std::string(name(f.problem.dtype)));
      same("operation", first.operation, f.operation);
      // Points of different problems would coincide: one chart per problem.
      same("problem", shape(first), shape(f));
    }
  }

  static std::string shape(const ResultFile& f) {
    std::string text = problem_text(f);
    return text.substr(0, text.find(" inputs="));
  }

  void collect_points() {
    std::map<std::string, std::size_t> file_of;
    for (std::size_t n = 0; n < files_.size(); ++n)
      for (const StepRow& s : files_[n].steps) {
        const ResultFile& f = files_[n];
        double bytes = 0, exp = 0;
        for (const PhaseRow& p : s.phases) bytes += p.hbm_bytes(), exp += p.exp;
        if (!(s.flop > 0) || !(bytes > 0) || !(s.predicted_s > 0)) continue;  // unsupported
        Point p{s.name, n, s.flop / bytes, s.flop / s.predicted_s,
                s.median_s ? s.flop / *s.median_s : 0};
        points_.push_back(p);
        several_runs_ |= file_of.emplace(s.name, n).first->second != n;
        if (exp > 0) flop_per_exp_ = std::max(flop_per_exp_, operations_per_exp(f, s.flop / exp));
      }
    if (points_.empty())
      throw InputError(fmt::format("{}: has no step with operations and HBM bytes to draw",
                                   printable(files_[0].path.string())));
  }

  // Every algorithm needs at least one exponential per score, even if a step computes it twice. By
  // convention a score is 4 d operations forward, and 2.5 times that backward.
  static double operations_per_exp(const ResultFile& f, double of_the_step) {
    const double d = static_cast<double>(f.problem.head_dim);
    return f.problem.matrix ? of_the_step : f.operation == "backward" ? 10 * d : 4 * d;
  }

  const RoofRow* roof(std::string_view name) const {
    for (const RoofRow& r : files_[0].roofs)
      if (r.name == name) return &r;
    return nullptr;
  }

  // ", measured" if the roofs have different sources; else the title names the source.
  std::string source_text(const RoofRow& r) const {
    const auto& all = files_[0].roofs;
    const bool one =
        std::all_of(all.begin(), all.end(), [&](const RoofRow& x) { return x.source == r.source; });
    return one ? "" : ", " + r.source;
  }

  void collect_roofs() {
    const DType type = files_[0].problem.dtype;
    const auto flat = [&](const char* key, const std::string& title, const char* unit) {
      if (const RoofRow* r = roof(key))
        flats_.push_back(
            {r->per_second,
             fmt::format("{} {}{}", title, rate_text(r->per_second, unit), source_text(*r)),
             false});
    };
    flat("fp32", "FP32", "FLOP/s");
    if (type != DType::fp32)
      flat(type == DType::fp16   ? "tensor_fp16"
           : type == DType::e4m3 ? "tensor_e4m3"
                                 : "tensor_bf16",
           fmt::format("tensor {}", name(type)), "FLOP/s");
    if (const RoofRow* r = roof("exp"); r && flop_per_exp_ > 0)
      flats_.push_back({r->per_second * flop_per_exp_,
                        fmt::format("exponentials {}{}: at {:.0f} operations each, {}",
                                    rate_text(r->per_second, "/s"), source_text(*r), flop_per_exp_,
                                    rate_text(r->per_second * flop_per_exp_, "FLOP/s")),
                        true});
    if (!roof("hbm_copy"))
      throw InputError(
          fmt::format("{}: roofs.hbm_copy is null, and without it there is no roofline",
                      printable(files_[0].path.string())));
  }

  void choose_range() {
    double left = 1e300, right = 0, low = 1e300, high = 0;
    const double bandwidth = roof("hbm_copy")->per_second;
    for (const Point& p : points_) {
      left = std::min(left, p.intensity), right = std::max(right, p.intensity);
      for (const double y : {p.predicted, p.measured})
        if (y > 0) low = std::min(low, y), high = std::max(high, y);
    }
    for (const FlatRoof& f : flats_) {
      high = std::max(high, f.rate);
      low = std::min(low, f.rate);
      right = std::max(right, f.rate / bandwidth);  // the corner
    }
    // No GPU exceeds these limits, and axes of hundreds of decades would be useless.
    if (!(left >= 1e-9 && right <= 1e12 && low >= 1 && high <= 1e24))
      throw InputError(fmt::format(
          "{}: its rates ({:.3g} to {:.3g} operations/s at {:.3g} to {:.3g} operations a "
          "byte) are no GPU's (accepted: 1 to 1e24 and 1e-9 to 1e12)",
          printable(files_[0].path.string()), low, high, left, right));
    x0_ = std::log10(left / 8), x1_ = std::log10(right * 3);
    y0_ = std::log10(low / 2.5), y1_ = std::log10(high * 2);
  }

  double px(double intensity) const {
    return kPlot.left + (std::log10(intensity) - x0_) / (x1_ - x0_) * (kPlot.right - kPlot.left);
  }
  double py(double rate) const {
    return kPlot.bottom - (std::log10(rate) - y0_) / (y1_ - y0_) * (kPlot.bottom - kPlot.top);
  }

  void head() {
    const ResultFile& f = files_[0];
    const std::string problem = shape(f);
    const std::string title =
        fmt::format("Roofline: {}{}", f.gpu.empty() ? f.roofs_of : f.gpu,
                    f.gpu.empty() ? " (predictions alone: no GPU was measured)" : "");
    out_.text = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
        "height=\"{1}\" "
        "role=\"img\" aria-labelledby=\"{2}-t {2}-d\">\n",
        kWidth, height_, escaped(id_));
    add("<title id=\"{}-t\">{}</title>", escaped(id_), escaped(title));
    std::string description = f.operation + ", " + problem + ".";
    for (const Point& p : points_)
      description += fmt::format(
          " {}: {:.0f} operations a byte, at most {}{}.", p.name + run_of(p), p.intensity,
          rate_text(p.predicted, "FLOP/s"),
          p.measured > 0 ? ", measured " + rate_text(p.measured, "FLOP/s") : std::string());
    add("<desc id=\"{}-d\">{}</desc>", escaped(id_), escaped(description));
    out_.text += roofline_style();
    add("<defs><marker id=\"{}-a\" viewBox=\"0 0 10 10\" refX=\"9\" refY=\"5\" markerWidth=\"7\" "
        "markerHeight=\"7\" orient=\"auto\"><path class=\"head\" d=\"M0 0 L10 5 L0 10 "
        "z\"/></marker></defs>",
        escaped(id_));
    add("<rect class=\"bg\" x=\"0.5\" y=\"0.5\" width=\"{}\" height=\"{}\" rx=\"6\"/>", kWidth - 1,
        height_ - 1);
    add("<text class=\"t\" x=\"24\" y=\"32\">{}</text>", escaped(title));
    add("<text class=\"s\" x=\"24\" y=\"54\">{}</text>",
        escaped(f.operation + ", " + problem +
                (source_text(*roof("hbm_copy")).empty()
                     ? fmt::format("; roofs: {}", roof("hbm_copy")->source)
                     : "")));
    add("<circle class=\"hollow\" cx=\"30\" cy=\"72\" r=\"7\"/><text x=\"42\" "
        "y=\"77\">predicted</text>");
    const bool any_measured =
        std::any_of(points_.begin(), points_.end(), [](auto& p) { return p.measured > 0; });
    if (any_measured)
      add("<circle class=\"filled\" cx=\"130\" cy=\"72\" r=\"4.5\"/><text x=\"142\" "
          "y=\"77\">measured</text>"
          "<path class=\"arrow\" d=\"M220 72 L250 72\" marker-end=\"url(#{}-a)\"/>"
          "<text x=\"260\" y=\"77\">from {}</text>",
          escaped(id_), several_runs_ ? "run to run" : "step to step");
    if (!several_runs_) return;
    std::string runs;
    for (std::size_t n = 0; n < files_.size(); ++n)
      runs += fmt::format("{}{}: {}", n ? "; " : "", roofline_run(n),
                          printable(files_[n].path.string()));
    add("<text class=\"e s\" x=\"{}\" y=\"77\">{}</text>", kPlot.right, escaped(tail(runs, 75)));
  }

  std::string run_of(const Point& p) const {
    return several_runs_ ? " " + roofline_run(p.file) : "";
  }
  // Decades, and 2 and 5 of each if the axis is short.
  static std::vector<double> ticks(double from, double to) {
    std::vector<double> all;
    for (int decade = static_cast<int>(std::floor(from)); decade <= std::ceil(to); ++decade)
      for (const double m : {1., 2., 5.}) {
        const double x = decade + std::log10(m);
        if (x >= from && x <= to && (m == 1 || to - from < 3.5)) all.push_back(std::pow(10., x));
      }
    return all;
  }

  void grid() {
    for (const double x : ticks(x0_, x1_)) {
      add("<path class=\"grid\" d=\"M{0:.1f} {1} L{0:.1f} {2}\"/>", px(x), kPlot.top, kPlot.bottom);
      add("<text class=\"c s\" x=\"{:.1f}\" y=\"{}\">{:.6g}</text>", px(x), kPlot.bottom + 20, x);
    }
    for (const double y : ticks(y0_, y1_)) {
      add("<path class=\"grid\" d=\"M{1} {0:.1f} L{2} {0:.1f}\"/>", py(y), kPlot.left, kPlot.right);
      const double tera = y * 1e-12;
      add("<text class=\"e s\" x=\"{}\" y=\"{:.1f}\">{}</text>", kPlot.left - 8, py(y) + 4.5,
          tera < 0.999 ? fmt::format("{:.3g} G", tera * 1e3) : fmt::format("{:.6g} T", tera));
    }
    add("<rect class=\"plot\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>", kPlot.left,
        kPlot.top, kPlot.right - kPlot.left, kPlot.bottom - kPlot.top);
    add("<text class=\"c\" x=\"{}\" y=\"{}\">intensity: operations per byte of HBM traffic, as "
        "modelled "
        "(log scale)</text>",
        (kPlot.left + kPlot.right) / 2, kHeight - 22);
    add("<text class=\"c\" x=\"26\" y=\"{0}\" transform=\"rotate(-90 26 {0})\">attention "
        "operations per "
        "second, FLOP/s (log scale)</text>",
        (kPlot.top + kPlot.bottom) / 2);
  }

  void line(const Segment& s, const char* style) {
    add("<path class=\"{}\" d=\"M{:.1f} {:.1f} L{:.1f} {:.1f}\"/>", style, s.x1, s.y1, s.x2, s.y2);
  }

  // From the left or lower edge up to the highest flat roof.
  void slant(double bandwidth, const std::string& label, bool dashed, bool above) {
    double top = std::pow(10., y1_);
    if (!flats_.empty()) {
      top = 0;
      for (const FlatRoof& f : flats_) top = std::max(top, f.rate);
    }
    const double from = std::max(std::pow(10., x0_), std::pow(10., y0_) / bandwidth);
    const double to = std::min(std::pow(10., x1_), top / bandwidth);
    if (!(from < to)) return;
    const Segment s{px(from), py(from * bandwidth), px(to), py(to * bandwidth)};
    line(s, dashed ? "roof dash" : "roof");
    lines_.push_back(s);
    const double angle = std::atan2(s.y2 - s.y1, s.x2 - s.x1);
    // The label follows the line, starting at a tenth of it.
    const double x = s.x1 + 0.06 * (s.x2 - s.x1), y = s.y1 + 0.06 * (s.y2 - s.y1);
    const double away = above ? -7 : 16;
    const double tx = x - away * std::sin(angle), ty = y + away * std::cos(angle);
    add("<text class=\"rt halo\" x=\"{0:.1f}\" y=\"{1:.1f}\" transform=\"rotate({2:.1f} {0:.1f} "
        "{1:.1f})\">"
        "{3}</text>",
        tx, ty, angle * 180 / std::numbers::pi, escaped(label));
    // Small boxes along the line keep other labels away.
    for (double t = 0; t < kCharacter * static_cast<double>(label.size()); t += 8) {
      const double bx = tx + t * std::cos(angle), by = ty + t * std::sin(angle);
      obstacles_.push_back({bx - 8, by - 10, bx + 8, by + 8});
    }
  }

  void draw_roofs() {
    const RoofRow& hbm = *roof("hbm_copy");
    if (const RoofRow* l2 = roof("l2"))
      slant(l2->per_second,
            fmt::format("L2 {}{}: were all these bytes in L2", rate_text(l2->per_second, "B/s"),
                        source_text(*l2)),
            true, true);
    slant(hbm.per_second,
          fmt::format("HBM {}{}", rate_text(hbm.per_second, "B/s"), source_text(hbm)), false,
          false);
    std::sort(flats_.begin(), flats_.end(), [](auto& a, auto& b) { return a.rate > b.rate; });
    double above = -1e9;
    for (const FlatRoof& f : flats_) {
      const double y = py(f.rate);
      const Segment s{std::max(kPlot.left, px(f.rate / hbm.per_second)), y, kPlot.right, y};
      line(s, f.dashed ? "roof dash" : "roof");
      lines_.push_back(s);
      // Above its line, or below if the next higher roof leaves no room.
      const double base = y - above < 24 ? y + 17 : y - 7;
      above = y;
      const double width = kCharacter * static_cast<double>(f.label.size());
      add("<text class=\"e rt halo\" x=\"{}\" y=\"{:.1f}\">{}</text>", kPlot.right - 8, base,
          escaped(f.label));
      const Box box{kPlot.right - 8 - width, base - 12, kPlot.right - 8, base + 4};
      obstacles_.push_back(box);
      out_.labels.push_back(box);
    }
  }

  void draw_points() {
    std::vector<Marker> markers;
    const Point* previous = nullptr;
    std::map<std::string, const Point*> runs;  // previous run of a step
    for (const Point& p : points_) {
      const double x = px(p.intensity), yp = py(p.predicted);
      mark(markers, x, yp, false, p, p.predicted);
      if (!(p.measured > 0)) continue;
      const double ym = py(p.measured);
      mark(markers, x, ym, true, p, p.measured);
      line({x, yp, x, ym}, "gap");
      lines_.push_back({x, yp, x, ym});
      const Point*& from = several_runs_ ? runs[p.name] : previous;
      if (from) arrow({px(from->intensity), py(from->measured), x, ym});
      from = &p;
    }
    // Measured points get the better label positions.
    std::stable_sort(markers.begin(), markers.end(),
                     [](auto& a, auto& b) { return a.filled > b.filled; });
    // A dot inside a ring: measured and predicted values coincide.
    for (const bool filled : {false, true})
      for (const Marker& m : markers)
        if (m.filled == filled)
          add("<circle class=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\"/>",
              filled ? "filled" : "hollow", m.x, m.y, filled ? 4.5 : 7.0);
    for (const Marker& m : markers) obstacles_.push_back({m.x - 7, m.y - 7, m.x + 7, m.y + 7});
    std::vector<std::string> texts;
    for (const Marker& m : markers) texts.push_back(text(m, several_runs_));
    std::vector<Label> labels = place(markers, texts);
    if (!readable(labels, kPlot, obstacles_)) {
      key(texts);
      for (std::size_t i = 0; i < texts.size(); ++i) texts[i] = std::to_string(i + 1);
      labels = place(markers, texts);
    }
    for (const Label& l : labels)
      if (l.leader) line(leader_to(l, l.box), "leader");
    for (std::size_t i = 0; i < labels.size(); ++i) {
      const Box& b = labels[i].box;
      add("<text class=\"c halo\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", (b.left + b.right) / 2,
          b.bottom - 4, escaped(texts[i]));
      out_.labels.push_back(b);
    }
  }

  std::vector<Label> place(const std::vector<Marker>& markers,
                           const std::vector<std::string>& texts) const {
    std::vector<Label> labels;
    for (std::size_t i = 0; i < markers.size(); ++i)
      labels.push_back({markers[i].x,
                        markers[i].y,
                        kCharacter * static_cast<double>(texts[i].size()),
                        17,
                        {},
                        false});
    place_labels(labels, kPlot, obstacles_, lines_);
    return labels;
  }

  // The key below the plot that explains each number: one column, or two if all texts are short.
  void key(const std::vector<std::string>& texts) {
    std::vector<std::vector<std::string>> entries;
    std::size_t lines = 0;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      entries.push_back(wrapped(fmt::format("{}  {}", i + 1, texts[i]), 115));
      lines += entries.back().size();
    }
    const bool two = std::all_of(texts.begin(), texts.end(), [](auto& t) { return t.size() < 52; });
    const std::size_t column = two ? (lines + 1) / 2 : lines;
    std::size_t row = 0;
    for (const auto& entry : entries)
      for (const std::string& text : entry) {
        const double x = row < column ? 24 : kWidth / 2 + 12;
        const double y = kHeight + 10 + 19 * static_cast<double>(row % column);
        add("<text x=\"{}\" y=\"{}\">{}</text>", x, y, escaped(text));
        const double width = kCharacter * static_cast<double>(text.size());
        out_.labels.push_back({x, y - 13, x + width, y + 4});
        ++row;
      }
    height_ = kHeight + 20 + 19 * static_cast<double>(column);
  }

  // From one marker to the next, ending at the marker's edge.
  void arrow(Segment s) {
    const double length = std::hypot(s.x2 - s.x1, s.y2 - s.y1);
    if (length < 20) return;
    const double dx = (s.x2 - s.x1) / length, dy = (s.y2 - s.y1) / length;
    s = {s.x1 + 8 * dx, s.y1 + 8 * dy, s.x2 - 8 * dx, s.y2 - 8 * dy};
    add("<path class=\"arrow\" d=\"M{:.1f} {:.1f} L{:.1f} {:.1f}\" marker-end=\"url(#{}-a)\"/>",
        s.x1, s.y1, s.x2, s.y2, escaped(id_));
    lines_.push_back(s);
  }

  const std::vector<ResultFile>& files_;
  std::string id_;
  double flop_per_exp_ = 0;
  std::vector<Point> points_;
  std::vector<FlatRoof> flats_;
  double x0_ = 0, x1_ = 1, y0_ = 0, y1_ = 1;  // log10
  std::vector<Box> obstacles_;
  std::vector<Segment> lines_;
  bool several_runs_ = false;  // a step name occurs in several files
  double height_ = kHeight;
  RooflineSvg out_;
};

}  // namespace

RooflineSvg roofline_svg(const std::vector<ResultFile>& files, const std::string& id) {
  return Picture(files, id).draw();
}

}  // namespace attn::report
