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

  bool same_everywhere() const {
    return !cells.empty() &&
           std::all_of(cells.begin(), cells.end(), [&](const auto& x) { return x == cells[0]; });
  }
};

std::string table_text(const std::vector<Column>& columns, std::size_t rows) {
  std::vector<std::size_t> widths;
  for (const Column& c : columns) {
    widths.push_back(c.title.size());
    for (const std::string& cell : c.cells) widths.back() = std::max(widths.back(), cell.size());
  }
  std::string text;
  const auto add_row = [&](auto&& cell_of) {
    for (std::size_t i = 0; i < columns.size(); ++i)
      text += fmt::format("{:<{}}  ", cell_of(columns[i]), widths[i]);
    text.erase(text.find_last_not_of(' ') + 1);
    text += '\n';
  };
  add_row([](const Column& c) { return c.title; });
  for (std::size_t row = 0; row < rows; ++row)
    add_row([row](const Column& c) { return c.cells[row]; });
  return text;
}

}  // namespace

std::string summary_text(const std::vector<ResultFile>& files) {
  Column device{"device", {}}, problem{"problem", {}}, chapter{"chapter", {}}, step{"step", {}},
      operation{"operation", {}}, verdict{"verdict", {}}, time{"time", {}}, roof{"% of roof", {}},
      reason{"reason", {}};
  bool reasons = false, measured = false;
  std::set<std::string> predicted_for;
  for (const ResultFile& file : files) {
    for (const StepRow& s : file.steps) {
      const bool ran = s.outcome != "unsupported" && s.outcome != "error";
      device.cells.push_back(file.device);
      problem.cells.push_back(problem_text(file));
      chapter.cells.push_back(file.chapter);
      step.cells.push_back(s.name);
      operation.cells.push_back(s.operation);
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
  std::vector<Column> columns{chapter, step, operation, verdict, time, roof};
  for (const Column& c : {device, problem}) {
    if (c.same_everywhere())
      text += fmt::format("{}: {}\n", c.title, c.cells[0]);
    else
      columns.insert(columns.begin() + 1, c);
  }
  for (const std::string& gpu : predicted_for)
    text += fmt::format(
        "at least: not measured, but predicted for {}; --gpu NAME is for another: {}\n", gpu,
        gpu_names());
  if (reasons) columns.push_back(reason);
  return text + table_text(columns, step.cells.size());
}

}  // namespace attn::report
