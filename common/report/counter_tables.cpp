// Tables of ncu counters.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include "report/containers.h"
#include "report/counters.h"
#include "report/diff.h"
#include "report/profile.h"
#include "report/table_kinds.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

namespace fs = std::filesystem;

// n/a if a counter is absent, or if the kernel made no such request.
template <class Format>
std::string text(std::optional<double> x, const Format& format) {
  return x ? format(*x) : std::string("n/a");
}
std::string one_digit(double x) { return fmt::format("{:.1f}", x); }

// Measured traffic and the model's traffic. Phases are launches, in the same order, so if some
// phases have no model, only the launches of the others are counted.
struct Traffic {
  double modelled = 0;
  // sectors requested by loads and stores, including L1 hits
  std::optional<double> asked;
  std::optional<double> counted;  // lts__t_bytes
  std::string phases;  // phase names, unless all phases are modelled
};
Traffic l2_traffic(const StepRow& step, const std::vector<KernelCounters>& kernels) {
  Traffic t;
  bool all = true;
  for (const PhaseRow& p : step.phases) {
    t.modelled += p.l2_bytes;
    all = all && p.l2_bytes > 0;
    if (p.l2_bytes > 0) t.phases += (t.phases.empty() ? "" : ", ") + p.name;
  }
  const auto take = [&](const KernelCounters& total) {
    t.counted = total.value("l2_bytes");
    const auto loads = total.value("ld_sectors"), stores = total.value("st_sectors");
    if (loads && stores) t.asked = 32 * (*loads + *stores);
  };
  if (all) {
    t.phases.clear();
    take(step_total(kernels));
  } else if (kernels.size() == step.phases.size()) {
    std::vector<KernelCounters> modelled;
    for (std::size_t n = 0; n < kernels.size(); ++n)
      if (step.phases[n].l2_bytes > 0) modelled.push_back(kernels[n]);
    take(step_total(modelled));
  }
  return t;
}

}  // namespace

std::string counters_table(const fs::path& folder, const std::string& chapter) {
  Grid grid;
  std::vector<fs::path> files;
  for (const std::string& name : document_names(folder, chapter + ".", ".ncu.csv"))
    files.push_back(folder / (name + ".ncu.csv"));
  std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) {
    const std::string x = a.filename().string(), y = b.filename().string();
    const auto family = [](const std::string& s) { return s.substr(s.find('.') + 1, 1); };
    const auto number = [](const std::string& s) { return std::atoi(s.c_str() + s.find('.') + 2); };
    if (family(x) != family(y)) return family(x) > family(y);  // v steps before b steps
    return number(x) != number(y) ? number(x) < number(y) : x < y;  // v2 before v10
  });
  for (const fs::path& path : files) {
    const CounterFile file = read_counter_file(path);
    const std::string step =
        file.file.substr(chapter.size() + 1, file.file.size() - chapter.size() - 9);
    for (const KernelCounters& k : file.kernels) {
      grid.add_row();
      grid.add("step", "step", code(step));
      grid.add("kernel", "kernel", k.name);
      grid.add("ms", "ms", text(k.value("time_s"), milliseconds));
      grid.add("ld", "load sectors/request", text(k.value("ld_sectors_per_request"), one_digit));
      grid.add("st", "store sectors/request", text(k.value("st_sectors_per_request"), one_digit));
      grid.add("read", "HBM read GB", text(k.value("hbm_read_bytes"), gigabytes));
      grid.add("write", "HBM write GB", text(k.value("hbm_write_bytes"), gigabytes));
      grid.add("l2", "L2 GB", text(k.value("l2_bytes"), gigabytes));
    }
  }
  if (grid.empty())
    throw NotMeasured(fmt::format("{}: has no counters of {}", folder.string(), chapter));
  return grid.markdown();
}

// The counters that changed between two exports: in the whole step, or in a named kernel.
std::string diff_table(const fs::path& folder, const Words& names) {
  const auto read = [&](const std::string& name) {
    return read_steps(existing(folder / (name + ".ncu.csv")), "");
  };
  const Diff d = compare_files(read(names.at(0)), read(names.at(1)), false).at(0);
  const std::vector<Moved>* counters = &d.total;
  std::optional<double> time_a = d.time_a.median, time_b = d.time_b.median;
  std::string what = "whole step";
  if (names.size() > 2) {
    counters = nullptr;
    for (const KernelPair& k : d.kernels)
      if (k.name == names[2]) counters = &k.counters, time_a = k.a_s, time_b = k.b_s;
    if (!counters) throw InputError(fmt::format("table diff: no kernel {} in both", names[2]));
    what = fmt::format("`{}`", names[2]);
  }
  Grid grid;
  const auto add = [&](std::string_view label, const std::string& a, const std::string& b,
                       const std::string& factor) {
    grid.add_row();
    grid.add("what", what, std::string(label));
    grid.add("a", d.a.step, a);
    grid.add("b", d.b.step, b);
    grid.add("factor", "factor", factor);
  };
  const Counter& time = *find_counter("time_s");
  const Moved of_time{&time, time_a, time_b, *time_b / *time_a};
  add("time", value_text(time, time_a), value_text(time, time_b), factor_text(of_time));
  for (const Moved& m : *counters)
    if (moved(m))
      add(m.counter->label, value_text(*m.counter, m.a), value_text(*m.counter, m.b),
          factor_text(m));
  return grid.markdown();
}

std::string traffic_table(const fs::path& folder, const Words& words) {
  if (words.size() != 3)
    throw InputError("table traffic: needs a result file, a chapter and STEP,STEP");
  const ResultFile run = read_result_file(existing(folder / (words[0] + ".json")));
  if (run.chapter != words[1])
    throw InputError(
        fmt::format("table traffic: {} is of {}, not of {}", words[0], run.chapter, words[1]));
  Grid grid;
  std::istringstream steps(words[2]);
  for (std::string name; std::getline(steps, name, ',');) {
    const auto found =
        std::find_if(run.steps.begin(), run.steps.end(), [&](auto& s) { return s.name == name; });
    if (found == run.steps.end())
      throw InputError(fmt::format("table traffic: {} has no step {}", words[0], name));
    const fs::path path = existing(folder / fmt::format("{}.{}.ncu.csv", run.chapter, name));
    const StepData model = step_data(run, *found), counted = read_steps(path, name).at(0);
    // An export may lack its problem or its type. If present, they must match the results.
    const auto differ = [](const std::string& a, const std::string& b) {
      return !a.empty() && !b.empty() && a != b;
    };
    for (const auto& [a, b] :
         {std::pair(counted.problem, model.problem), std::pair(counted.dtype, model.dtype),
          std::pair(counted.compute_capability, model.compute_capability)})
      if (differ(a, b))
        throw InputError(fmt::format("table traffic: {} is of '{}', {} of '{}'",
                                     path.filename().string(), a, words[0], b));
    const Traffic l2 = l2_traffic(*found, counted.kernels);
    const KernelCounters total = step_total(counted.kernels);
    double hbm = 0;
    for (const PhaseRow& p : found->phases) hbm += p.hbm_bytes();
    grid.add_row();
    grid.add("step", "step", code(name) + (l2.phases.empty() ? "" : " " + l2.phases));
    grid.add("model", "modelled L2 GB", l2.modelled > 0 ? gigabytes(l2.modelled) : "n/a");
    grid.add("asked", "asked by SMs GB", text(l2.asked, gigabytes));
    grid.add("ratio", "asked / modelled",
             l2.asked && l2.modelled > 0 ? fmt::format("{:.2f}", *l2.asked / l2.modelled) : "n/a");
    grid.add("l2", "counted in L2 GB", text(l2.counted, gigabytes));
    grid.add("hbm_model", "modelled HBM GB", gigabytes(hbm));
    grid.add("hbm", "counted HBM GB", text(total.value("hbm_bytes"), gigabytes));
  }
  if (grid.empty()) throw InputError("table traffic: names no step");
  const StepData any = step_data(run, run.steps.front());
  return fmt::format("{}, {}; one launch under ncu: sectors of loads and stores, "
                     "`lts__t_bytes`, `dram__bytes`.\n\n{}", run.gpu, any.problem,
                     grid.markdown());
}

}  // namespace attn::report
