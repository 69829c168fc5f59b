// A chapter's ladder: its steps as the tree of their parents, with times, ratios and counters.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include "report/containers.h"
#include "report/diff.h"
#include "report/profile.h"
#include "report/step_sources.h"
#include "report/table_kinds.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

std::string name_of(const json& step) { return step.at("name").get<std::string>(); }

// Finds the folder of a chapter: the page's folder, inside it, or next to it.
std::vector<StepSource> sources_of(const fs::path& page, const std::string& chapter) {
  const fs::path here = fs::absolute(page).parent_path();
  for (const fs::path& folder : {here, here / chapter, here.parent_path() / chapter})
    if (folder.filename() == chapter)
      if (auto steps = read_step_sources(folder); !steps.empty()) return steps;
  throw InputError(fmt::format("{}: no folder {} with step files in its folder or next to it",
                               page.string(), chapter));
}

// Counters that depend on how a kernel ran, not only on its launch (registers, shared memory).
bool telling(const Counter& c) {
  static const std::set<std::string_view> kTelling{"hbm_read_bytes",
                                                   "hbm_write_bytes",
                                                   "l2_bytes",
                                                   "ld_requests",
                                                   "st_requests",
                                                   "ld_sectors",
                                                   "st_sectors",
                                                   "ld_sectors_per_request",
                                                   "st_sectors_per_request",
                                                   "shared_wavefronts",
                                                   "shared_ld_wavefronts",
                                                   "shared_st_wavefronts",
                                                   "bank_conflict_pct",
                                                   "instructions",
                                                   "xu_instructions",
                                                   "tensor_bf16_ops",
                                                   "tensor_fp16_ops",
                                                   "warps_active_pct"};
  return kTelling.contains(c.key) || c.key.starts_with("stall_");
}

// A change of at least 10 %: less is noise from run to run.
bool above_noise(const Moved& m) {
  return m.a && m.b && std::abs(std::log(m.factor)) >= std::log(1.1);
}

// Whether an unexpected change is large enough to report: a tenth of a cycle for a stall reason,
// 5 % of the total for a share, 1 % of the instructions for issued instructions.
bool matters(const Moved& m, const KernelCounters& a, const KernelCounters& b) {
  const double change = std::abs(*m.b - *m.a);
  const std::string_view key = m.counter->key;
  if (key.starts_with("stall_")) return change >= 0.1;
  if (m.counter->unit == "%") return change >= 5;
  const auto before = a.value("instructions"), after = b.value("instructions");
  if (!before || !after || m.counter->kind != Kind::count || m.counter->unit == "byte") return true;
  return change >= 0.01 * std::max(*before, *after);
}

// "instructions: 151.6 Minst to 120.2 Minst": the largest change among the counters that the step's
// header expects to change, else among all; "-" if nothing was counted or nothing changed.
std::string moved_most(const fs::path& folder, const std::string& chapter, const std::string& from,
                       const StepSource& to) {
  const fs::path a = folder / fmt::format("{}.{}.ncu.csv", chapter, from),
                 b = folder / fmt::format("{}.{}.ncu.csv", chapter, to.name);
  const auto counted = [](const fs::path& path) {
    return fs::exists(path) || is_contained(path);
  };
  if (!counted(a) || !counted(b)) return "-";
  const Diff d = compare_files(read_steps(a, from), read_steps(b, to.name), true).at(0);
  // Counters of two problems differ by the problem.
  if (d.a.problem != d.b.problem || d.a.dtype != d.b.dtype) return "-";
  const KernelCounters before = step_total(d.a.kernels), after = step_total(d.b.kernels);
  const Moved* most = nullptr;
  bool expected = false;
  for (const Moved& m : d.total) {
    if (!telling(*m.counter) || !above_noise(m)) continue;
    const bool now = expects(to, *m.counter);
    if (!now && !matters(m, before, after)) continue;
    if (!most || (now && !expected) || (now == expected && m.rank > most->rank))
      most = &m, expected = now;
  }
  if (!most) return "-";
  return fmt::format("{}: {} to {}", most->counter->label, value_text(*most->counter, most->a),
                     value_text(*most->counter, most->b));
}

// The differences between the problems of several runs, for column titles: "B=16 N=8192".
std::string difference(const json& problem, const json& other) {
  std::string text;
  for (const auto& [key, name] : {std::pair("batch", "B"),
                                  {"heads", "Hq"},
                                  {"kv_heads", "Hkv"},
                                  {"seqlen_q", "Nq"},
                                  {"seqlen_k", "N"},
                                  {"head_dim", "d"}})
    if (problem.at(key) != other.at(key) &&
        !(std::string_view(key) == "seqlen_q" && problem.at(key) == problem.at("seqlen_k")))
      text += fmt::format("{}={} ", name, problem.at(key).get<int64_t>());
  if (problem.at("dtype") != other.at("dtype"))
    text += problem.at("dtype").get<std::string>() + " ";
  if (problem.at("causal") != other.at("causal") && problem.at("causal").get<bool>())
    text += "causal ";
  return text;
}

// "&emsp;" for each depth of a branch.
std::string indented(const TreeRow& row) {
  std::string text;
  for (int n = 0; n < row.depth; ++n) text += "&emsp;";
  return text + (row.depth > 0 ? "\u2514 " : "") + code(row.step->name);
}

}  // namespace

// The timed steps as a tree: the time of one problem or of several, the speedup over the parent,
// and a counter that changed.
std::string ladder_table(const fs::path& folder, const Words& names, const fs::path& page) {
  std::vector<json> runs;
  for (const std::string& name : names) runs.push_back(read_json(folder / (name + ".json")));
  const std::string chapter = runs.at(0).at("chapter").get<std::string>();
  Words timed;
  for (const json& s : runs[0].at("steps"))
    if (!s.at("time").is_null()) timed.push_back(name_of(s));
  if (timed.empty()) throw InputError(fmt::format("table ladder: {} has no times", names.at(0)));
  const auto time_of = [](const json& run, const std::string& wanted) -> std::optional<double> {
    for (const json& s : run.at("steps"))
      if (name_of(s) == wanted && !s.at("time").is_null())
        return s.at("time").at("median_s").get<double>();
    return std::nullopt;
  };
  const std::vector<StepSource> sources = sources_of(page, chapter);
  const std::vector<TreeRow> tree = step_tree(sources, timed);
  for (const std::string& name : timed)
    if (std::none_of(tree.begin(), tree.end(), [&](auto& row) { return row.step->name == name; }))
      throw InputError(
          fmt::format("table ladder: {}/{}.cu is not there, or its parents go in a "
                      "circle",
                      chapter, name));
  Grid grid;
  for (const TreeRow& row : tree) {
    const StepSource& step = *row.step;
    grid.add_row();
    grid.add("step", "step", indented(row));
    grid.add("parent", "parent",
             step.parent.empty() ? "-" : code(step.parent.substr(0, step.parent.find('_'))));
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const auto own = time_of(runs[i], step.name), before = time_of(runs[i], step.parent);
      const std::string ms = fmt::format("ms{}", i), ratio = fmt::format("ratio{}", i);
      const json& problem = runs[i].at("problem");
      const std::string what =
          runs.size() > 1 ? difference(problem, runs[i == 0 ? 1 : 0].at("problem")) : "";
      grid.add_column(ms, what + "ms");
      grid.add_column(ratio, what + "x parent");
      if (own) grid.put(ms, milliseconds(*own));
      if (own && before) grid.put(ratio, fmt::format("{:.2f}", *before / *own));
    }
    if (!step.parent.empty())
      grid.add("moved", "counter that moved", moved_most(folder, chapter, step.parent, step));
  }
  Words problems;
  for (const json& run : runs) problems.push_back(problem_text(run.at("problem")));
  return fmt::format("{}, {}: {}; `x parent`: how many times faster than the parent.\n\n{}",
                     runs[0].at("device").at("name").get<std::string>(),
                     runs[0].at("operation").get<std::string>(), fmt::join(problems, " and "),
                     grid.markdown());
}

// All steps of a chapter as a tree drawing.
std::string tree_figure(const std::string& chapter, const fs::path& page) {
  const std::vector<StepSource> sources = sources_of(page, chapter);
  const std::vector<TreeRow> rows = step_tree(sources, {});
  std::string text =
      "A step's parent is the step of the trunk above it, unless (parent: ...) follows its name. "
      "├─ starts a branch below its parent, │ continues it.\n\n"
      "```text\n";
  for (std::size_t i = 0; i < rows.size(); ++i) {
    // A line on the left of a branch leads from its parent to the next step at the parent's depth.
    const auto above = std::find_if(rows.rend() - static_cast<std::ptrdiff_t>(i), rows.rend(),
                                    [&](auto& row) { return row.depth <= rows[i].depth; });
    const bool first_of_branch = above == rows.rend() || above->depth < rows[i].depth ||
                                 rows[i].step->parent != above->step->name;
    for (int depth = 0; depth < rows[i].depth; ++depth) {
      const bool last = depth + 1 == rows[i].depth;
      text += last && first_of_branch ? "\u251c\u2500 " : "\u2502  ";
    }
    text += rows[i].step->name;
    if (!rows[i].step->from.empty()) text += fmt::format("  (parent: {})", rows[i].step->from);
    text += "\n";
  }
  return text + "```\n";
}

}  // namespace attn::report
