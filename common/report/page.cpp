#include "report/page.h"

#include <fmt/format.h>

#include <algorithm>

#include "attn/error.h"
#include "report/diff.h"
#include "report/json_object.h"
#include "report/markdown.h"
#include "report/markup.h"
#include "report/roofline_svg.h"
#include "report/sha256.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

constexpr const char* kHead = R"(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="generator" content="attn_report page">
<style>
:root { --text: #1d2530; --soft: #56616f; --back: #ffffff; --line: #d9dfe5; --head: #eef3f8;
        --good: #2c6e40; --bad: #a3271b; --warn: #8a5a00; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --text: #dfe5ec; --soft: #a9b4c0; --back: #1b2027; --line: #414b57; --head: #27313c;
          --good: #97d8aa; --bad: #ff9d8f; --warn: #f0c36d; } }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
       color: var(--text); background: var(--back);
       max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem;
     border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
table { border-collapse: collapse; margin: .6rem 0 1.2rem; font-size: .9rem; }
th, td { border: 1px solid var(--line); padding: .25rem .6rem;
         text-align: left; vertical-align: top; }
th { background: var(--head); font-weight: 600; }
td.w, td:first-child { white-space: nowrap; }
td.n { text-align: right; white-space: nowrap;
       font-variant-numeric: tabular-nums; }
.soft { color: var(--soft); } .good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; } .warn { color: var(--warn); font-weight: 600; }
.log { overflow-wrap: anywhere; border-left: 3px solid var(--line); padding-left: 1rem; }
.log pre { overflow-x: auto; background: var(--head); padding: .5rem .8rem; }
.log blockquote { border-left: 3px solid var(--line); margin-left: 0; padding-left: 1rem; }
.scroll { overflow-x: auto; }
.answer { border: 1px dashed var(--line); min-height: 3.5rem; margin: .3rem 0 1rem; }
svg { max-width: 100%; height: auto; } code { font-size: .92em; overflow-wrap: anywhere; }
@media print { body { margin: 0; max-width: none; } h2 { break-after: avoid; } }
</style>
)";

constexpr const char* kQuestions[] = {
    "What did you predict, and from which formula? Which roof should bind?",
    "What did you change, and why should it help?",
    "What moved? Which counter shows it, and did anything move that should not have?",
    "Where prediction and measurement differ: what explains the gap?",
    "What did you try that did not help?",
    "What would you try next, and what would it move?",
};

constexpr std::string_view kMark = "\n<!-- sha256 ";

// The part after the content. It contains the checksum, so the checksum does not cover it.
std::string tail(const std::string& sum) {
  return fmt::format(
      "{}{} of all bytes before this line -->\n<footer class=\"soft\"><p>Checksum (SHA-256): "
      "<code>{}</code>. <code>attn_report page --verify FILE</code> says whether the page is as it "
      "was written. It guards against accidents, not against intent: whoever changes the page can "
      "change the checksum too.</p></footer>\n</body>\n</html>\n",
      kMark, sum, sum);
}

std::string cell(std::string_view text, const char* style = "") {
  return fmt::format("<td{}>{}</td>", *style ? fmt::format(" class=\"{}\"", style) : "",
                     escaped(text));
}
std::string number(std::string_view text) { return cell(text, "n"); }

std::string row(const std::vector<std::string>& cells) {
  return fmt::format("<tr>{}</tr>\n", fmt::join(cells, ""));
}

std::string table(const std::vector<std::string>& titles, const std::string& rows) {
  std::string head;
  for (const std::string& t : titles) head += fmt::format("<th>{}</th>", escaped(t));
  return fmt::format("<div class=\"scroll\"><table>\n<tr>{}</tr>\n{}</table></div>\n", head, rows);
}

std::string section_title(const ResultFile& r) {
  return fmt::format("<h3>{}: {}, {}</h3>\n", escaped(r.chapter), escaped(r.operation),
                     escaped(problem_text(r)));
}

std::string environment(const PageInput& in) {
  std::string rows;
  for (const ResultFile& r : in.results) {
    const auto version = [](int v) {
      return v > 0 ? fmt::format("{}.{}", v / 1000, v % 1000 / 10) : std::string("none");
    };
    std::string roofs;
    for (const RoofRow& roof : r.roofs)
      roofs += fmt::format("{}{} {:.3g} T/s ({})", roofs.empty() ? "" : ", ", roof.name,
                           roof.per_second * 1e-12, roof.source);
    rows += row({cell(r.path.filename().string()), cell(r.chapter), cell(r.device),
                 cell(r.on_gpu ? version(r.cuda_driver) + " / " + version(r.cuda_runtime) : "-"),
                 cell(fmt::format("{}: {}", r.roofs_of, roofs))});
  }
  std::string out = table({"file", "chapter", "device", "CUDA driver / runtime", "roofs"}, rows);
  rows.clear();
  for (const Profile& p : in.profiles)
    rows += row({cell(p.run.path.filename().string()), cell(p.step().name), cell(p.counters.file),
                 cell(p.counters.clocks.empty() ? "not stated" : p.counters.clocks)});
  if (!rows.empty()) out += table({"profile", "step", "counters from", "clock control"}, rows);
  return out;
}

const char* style_of(const std::string& outcome) {
  return outcome == "pass" ? "good" : outcome == "fail" || outcome == "error" ? "bad" : "warn";
}

std::string correctness(const ResultFile& r) {
  std::vector<std::string> tensors;
  for (const StepRow& s : r.steps)
    for (const VerdictRow& v : s.verdicts)
      if (std::find(tensors.begin(), tensors.end(), v.tensor) == tensors.end())
        tensors.push_back(v.tensor);
  std::string rows;
  for (const StepRow& s : r.steps) {
    std::vector<std::string> cells = {cell(s.name), cell(s.outcome, style_of(s.outcome))};
    for (const std::string& t : tensors) {
      const auto v = std::find_if(s.verdicts.begin(), s.verdicts.end(),
                                  [&](const VerdictRow& x) { return x.tensor == t; });
      const auto text = [](std::optional<double> x) {
        return x ? fmt::format("{:.1e}", *x) : std::string("not finite");
      };
      cells.push_back(
          v == s.verdicts.end()
              ? cell("-")
              : cell(fmt::format("{}: {} of {}, {} rows", v->pass ? "pass" : "FAIL",
                                 text(v->worst_row_error), text(v->bound), v->rows_checked),
                     v->pass ? "good" : "bad"));
    }
    std::string why = escaped(s.reason);
    for (const VerdictRow& v : s.verdicts)
      for (const std::string& line : v.shape)
        why += fmt::format("<br>{} {}", escaped(v.tensor), escaped(line));
    if (!s.varied.empty()) why += "<br>varied: " + escaped(s.varied);
    cells.push_back(fmt::format("<td>{}</td>", why));
    rows += row(cells);
  }
  std::vector<std::string> titles = {"step", "verdict"};
  for (const std::string& t : tensors) titles.push_back(t + ": worst row error of its bound");
  titles.emplace_back("reason");
  return section_title(r) + table(titles, rows);
}

std::string measurement(const ResultFile& r) {
  std::string rows;
  const auto line = [&](const std::string& step, const std::string& phase, double predicted,
                        const std::string& binding, const std::optional<Time>& time, double bytes,
                        double flop) {
    rows +=
        row({cell(step), cell(phase, "w"), number(milliseconds(predicted)), cell(binding),
             number(time ? fmt::format("{} ({} .. {})", milliseconds(time->median),
                                       milliseconds(time->q1), milliseconds(time->q3))
                         : "not measured"),
             number(time ? fmt::format("{:.1f} %", 100 * predicted / time->median) : "-"),
             number(fmt::format("{:.3g}", bytes * 1e-9)),
             number(time && flop > 0 ? fmt::format("{:.2f}", flop / time->median * 1e-12) : "-")});
  };
  for (const StepRow& s : r.steps) {
    if (s.outcome == "unsupported") continue;
    line(s.name, "whole step", s.predicted_s, s.binding, s.time, s.modelled_bytes, s.flop);
    if (s.phases.size() > 1)
      for (const PhaseRow& p : s.phases)
        line("", p.name, p.predicted_s, p.binding, p.time, p.hbm_bytes(), 0);
  }
  return section_title(r) +
         table({"step", "phase", "predicted, ms", "binding roof", "measured, ms (quartiles)",
                "of the roof", "modelled, GB", "TFLOP/s"},
               rows);
}

std::string rooflines(const PageInput& in) {
  std::string out;
  int number = 0;
  for (const ResultFile& r : in.results) {
    try {
      out += section_title(r) + roofline_svg({r}, fmt::format("roofline{}", number++)).text;
    } catch (const InputError& e) {
      out += fmt::format("<p class=\"soft\">No picture: {}</p>\n", escaped(e.what()));
    }
  }
  return out;
}

std::string comparison(const Diff& d) {
  const char* style = d.judgement == Judgement::fast   ? "good"
                      : d.judgement == Judgement::slow ? "bad"
                                                       : "warn";
  std::string out =
      fmt::format("<h3>{} to {}</h3>\n<p><span class=\"{}\">{}</span>: {} ({}).</p>\n",
                  escaped(d.a.step), escaped(d.b.step), style, name(d.judgement),
                  escaped(times_text(d, d.a.step, d.b.step)), escaped(d.time_source));
  if (d.total.empty())
    return out + "<p class=\"soft\">No counters: no profile of both steps.</p>\n";
  if (std::string most = headline(d); !most.empty()) {
    most[0] = 'W';  // "what moved most"
    out += fmt::format("<p>{}</p>\n", escaped(most));
  }
  std::string rows;
  for (const Moved& m : d.total)
    if (moved(m))
      rows += row({cell(m.counter->label), number(value_text(*m.counter, m.a)),
                   number(value_text(*m.counter, m.b)), number(factor_text(m)),
                   cell(better_text(m), better_text(m) == "worse" ? "bad" : ""),
                   cell(m.counter->meaning)});
  return out + table({"counter", d.a.step, d.b.step, "factor", "", "meaning"}, rows);
}

// Each step compared with the previous one in its file, with the counters of matching profiles.
std::string comparisons(const PageInput& in) {
  std::string out;
  std::vector<bool> used(in.profiles.size());
  for (const ResultFile& r : in.results) {
    std::string part;
    std::optional<StepData> previous;
    for (const StepRow& s : r.steps) {
      StepData step = step_data(r, s);
      for (std::size_t i = 0; i < in.profiles.size(); ++i) {
        StepData profiled = step_data(in.profiles[i]);
        if (profiled.chapter != step.chapter || profiled.step != step.step ||
            profiled.problem != step.problem || profiled.gpu != step.gpu)
          continue;
        used[i] = true;
        step.kernels = profiled.kernels;
        step.clocks = profiled.clocks;
      }
      if (!step.time) continue;
      if (previous) try {
          part += comparison(compare(*previous, step, false));
        } catch (const InputError& e) {
          part += fmt::format("<p class=\"soft\">{}</p>\n", escaped(e.what()));
        }
      previous = std::move(step);
    }
    if (!part.empty()) out += section_title(r) + part;
  }
  for (std::size_t i = 0; i < used.size(); ++i)
    if (!used[i])
      throw InputError(fmt::format("{}: is of {} on '{}', which none of the results hold",
                                   printable(in.profiles[i].run.path.string()),
                                   in.profiles[i].step().name, step_data(in.profiles[i]).problem));
  return out.empty()
             ? "<p class=\"soft\">Nothing to compare: no two steps of a file were timed.</p>\n"
             : out;
}

std::string work_log(const PageInput& in) {
  if (in.log) return fmt::format("<div class=\"log\">\n{}</div>\n", markdown(*in.log, 3));
  std::string out =
      "<p class=\"soft\">No log was given. Answer these questions in a text file and write the "
      "page "
      "again with <code>--log FILE</code>; what is typed into a finished page breaks its checksum. "
      "On paper, there is room below.</p>\n";
  for (const char* q : kQuestions)
    out += fmt::format("<h3>{}</h3>\n<div class=\"answer\"></div>\n", q);
  return out;
}

}  // namespace

std::string page(const PageInput& in) {
  if (in.results.empty()) throw InputError("page: no results");
  std::vector<std::string> chapters;
  for (const ResultFile& r : in.results)
    if (std::find(chapters.begin(), chapters.end(), r.chapter) == chapters.end())
      chapters.push_back(r.chapter);
  const std::string title = escaped(fmt::format("Report: {}", fmt::join(chapters, ", ")));
  std::string out = kHead;
  out += fmt::format("<title>{0}</title>\n</head>\n<body>\n<h1>{0}</h1>\n", title);
  if (!in.name.empty()) out += fmt::format("<p>By {}</p>\n", escaped(printable(in.name)));
  const auto section = [&](const char* heading, const std::string& content) {
    out += fmt::format("<h2>{}</h2>\n{}", heading, content);
  };
  section("Environment", environment(in));
  std::string parts;
  for (const ResultFile& r : in.results) parts += correctness(r);
  section("Correctness", parts);
  parts.clear();
  for (const ResultFile& r : in.results) parts += measurement(r);
  section("Prediction and measurement", parts);
  section("Roofline", rooflines(in));
  section("Each step and the one before it", comparisons(in));
  section("Work log", work_log(in));
  return out + tail(sha256(out));
}

Verification verify_page(const std::string& bytes, const std::string& file) {
  const std::size_t mark = bytes.rfind(kMark), digits = mark + kMark.size();
  if (mark == bytes.npos || digits + 64 > bytes.size() || !bytes.starts_with("<!DOCTYPE html>"))
    throw InputError(fmt::format(
        "{}: is no page with a checksum, or was not written to its end (accepted: what attn_report "
        "page writes)",
        file));
  Verification v;
  v.said = printable(bytes.substr(digits, 64));
  v.found = sha256(std::string_view(bytes).substr(0, mark));
  // Only the text that page() writes may follow the content.
  v.intact = v.said == v.found && bytes.substr(mark) == tail(v.said);
  return v;
}

}  // namespace attn::report
