#include "report/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "device/gpus.h"
#include "device/roofline.h"

namespace attn::report {
namespace {

struct Column {
  std::string title;
  std::vector<std::string> cells;
};

// A heading, if there is one, is placed above its row.
std::string table_text(const std::vector<Column>& columns,
                       const std::vector<std::string>& headings) {
  std::vector<std::size_t> widths;
  for (const Column& c : columns) {
    widths.push_back(c.title.size());
    for (const std::string& cell : c.cells) widths.back() = std::max(widths.back(), cell.size());
  }
  std::string text;
  const auto add_row = [&](auto&& cell_of) {
    for (std::size_t i = 0; i < columns.size(); ++i)
      text += fmt::format("  {:<{}}", cell_of(columns[i]), widths[i]);
    text.erase(text.find_last_not_of(' ') + 1);
    text += '\n';
  };
  add_row([](const Column& c) { return c.title; });
  for (std::size_t row = 0; row < headings.size(); ++row) {
    if (!headings[row].empty()) text += headings[row] + '\n';
    add_row([row](const Column& c) { return c.cells[row]; });
  }
  return text;
}

}  // namespace

std::string summary_text(const std::vector<ResultFile>& files) {
  Column step{"step", {}}, verdict{"verdict", {}}, time{"time", {}}, roof{"% of roof", {}},
      reason{"reason", {}};
  std::vector<std::string> headings;
  std::string heading;
  bool reasons = false, measured = false;
  std::set<std::string> devices, predicted_for;
  for (const ResultFile& file : files)
    if (!file.steps.empty()) devices.insert(file.device);
  for (const ResultFile& file : files) {
    for (const StepRow& s : file.steps) {
      const bool ran = s.outcome != "unsupported" && s.outcome != "error";
      const std::string now =
          fmt::format("{} {}: {}{}", file.chapter, s.operation, problem_text(file),
                      devices.size() > 1 ? fmt::format("; device: {}", file.device) : "");
      headings.push_back(now == heading ? "" : now);
      heading = now;
      step.cells.push_back(s.name);
      verdict.cells.push_back(s.outcome);
      if (s.median_s) {
        measured = true;
        time.cells.push_back(time_text(*s.median_s));
        roof.cells.push_back(
            s.share_of_roof ? fmt::format("{:.1f} % {}", 100 * *s.share_of_roof, s.binding) : "-");
      } else if (ran && s.predicted_s > 0) {
        predicted_for.insert(file.roofs_of);
        time.cells.push_back("at least " + time_text(s.predicted_s));
        roof.cells.push_back(s.binding);
      } else {
        time.cells.push_back(ran ? "not measured" : "-");
        roof.cells.push_back("-");
      }
      reason.cells.push_back(s.reason);
      reasons |= !s.reason.empty();
    }
  }
  if (!measured) roof.title = "roof";

  std::string text;
  std::vector<Column> columns{step, verdict, time, roof};
  if (devices.size() == 1) text += fmt::format("device: {}\n", *devices.begin());
  for (const std::string& gpu : predicted_for)
    text += fmt::format(
        "at least: not measured, but predicted for {}; --gpu NAME is for another: {}\n", gpu,
        gpu_names());
  if (reasons) columns.push_back(reason);
  return text + table_text(columns, headings);
}

}  // namespace attn::report
