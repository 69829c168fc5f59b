#include "report/profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "report/encoding.h"
#include "report/json_object.h"

namespace attn::report {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kSchema = "attn-profile-1";
constexpr const char* kAccepted = "what attn_report import writes";

// Two measurements of the same launches differ by clocks and by gaps between launches, but a
// problem of twice the length takes four times as long.
constexpr double kFarApart = 3;
constexpr double kLongEnough = 1e-4;

// The operation and the problem without the seed, which changes values but not work.
std::string problem_key(std::string text) {
  if (const auto at = text.rfind(" seed="); at != text.npos) text.erase(at);
  return text;
}

std::string problem_key(const ResultFile& r, const StepRow& s) {
  return problem_key(fmt::format("{} {}", s.operation, r.problem.text()));
}

std::string name_of(const fs::path& path) { return printable(path.string()); }

// The step named `step`, or the only one.
const StepRow& find_step(const ResultFile& r, const std::string& step) {
  const std::string file = name_of(r.path);
  std::vector<std::string> names;
  for (const StepRow& s : r.steps) {
    if (s.name == step) return s;
    names.push_back(s.name);
  }
  if (step.empty() && r.steps.size() == 1) return r.steps.front();
  if (names.empty()) throw InputError(fmt::format("{}: holds no step", file));
  throw InputError(step.empty() ? fmt::format("{}: holds several steps, --step takes one of {}",
                                              file, fmt::join(names, ", "))
                                : fmt::format("{}: has no step {}, but {}", file, printable(step),
                                              fmt::join(names, ", ")));
}

// Why the export may not belong to this step, problem and GPU; empty if nothing contradicts it.
std::string mismatch(const StepData& run, const CounterFile& c) {
  const auto differ = [](const std::string& a, const std::string& b) {
    return !a.empty() && !b.empty() && a != b;
  };
  if (differ(run.gpu, c.gpu)) return fmt::format("of a '{}', not of a '{}'", c.gpu, run.gpu);
  if (differ(run.compute_capability, c.compute_capability))
    return fmt::format("of compute capability {}, not {}", c.compute_capability,
                       run.compute_capability);
  if (const std::string type = element_type(c.kernels); differ(run.dtype, type))
    return fmt::format("of kernels for {}, not {}", type, run.dtype);
  if (differ(run.problem, problem_key(c.problem)))
    return fmt::format("of the problem '{}', not '{}'", problem_key(c.problem), run.problem);
  const auto ncu = step_total(c.kernels).value("time_s");
  if (run.time && ncu && std::min(*ncu, run.time->median) > kLongEnough) {
    const double factor = *ncu / run.time->median;
    if (factor > kFarApart || factor < 1 / kFarApart)
      return fmt::format(
          "of launches of {:.3f} ms in all, where the step took {:.3f} ms: another "
          "problem?",
          1e3 * *ncu, 1e3 * run.time->median);
  }
  return "";
}

json to_json(const CounterFile& c, const std::string& clocks) {
  json kernels = json::array();
  for (const KernelCounters& k : c.kernels) {
    json values = json::object();
    for (const Counter& counter : all_counters()) {
      if (ncu_names(counter.key).empty()) continue;  // derived
      const auto x = k.value(counter.key);
      values[std::string(counter.key)] = x ? json(*x) : json(nullptr);
    }
    kernels.push_back({{"name", k.name},
                       {"signature", k.signature},
                       {"grid", k.grid},
                       {"block", k.block},
                       {"values", values}});
  }
  const auto known = [](const std::string& s) { return s.empty() ? json(nullptr) : json(s); };
  return {{"file", c.file},
          {"clocks", known(clocks)},
          {"compute_capability", known(c.compute_capability)},
          {"kernels", kernels}};
}

KernelCounters read_kernel(const Object& o) {
  KernelCounters k;
  k.name = o.text("name");
  k.signature = o.text("signature");
  k.grid = o.text("grid");
  k.block = o.text("block");
  const Object values = o.object("values");
  // A missing key counts as null: older profiles lack newer counters. An unknown key is an error.
  for (const std::string& key : values.keys()) {
    const Counter* c = find_counter(key);
    if (!c || ncu_names(c->key).empty())
      values.fail(values.name(printable(key).c_str()), "is not a counter of this suite");
    if (values.has(key.c_str())) k.values[key] = values.at_least_zero(key.c_str());
  }
  return k;
}

Profile read_profile(const json& document, const fs::path& path) {
  const Object o(document, name_of(path), "", kAccepted);
  if (const std::string schema = o.text("schema"); schema != kSchema)
    o.fail("schema", fmt::format("is '{}', must be '{}'", schema, kSchema));
  Profile p;
  p.run = read_run(o, path);
  p.run.steps.push_back(read_step(o.object("step")));
  const Object counters = o.object("counters");
  p.counters.file = counters.text("file");
  p.counters.step = p.step().name;
  p.counters.gpu = p.run.gpu;
  if (counters.has("clocks")) p.counters.clocks = counters.choice("clocks", {"none", "base"});
  if (counters.has("compute_capability"))
    p.counters.compute_capability = counters.text("compute_capability");
  for (const Object& k : counters.objects("kernels")) p.counters.kernels.push_back(read_kernel(k));
  if (p.counters.kernels.empty()) counters.fail("counters.kernels", "holds no kernel");
  return p;
}

StepData step_data(const CounterFile& c, const fs::path& path) {
  StepData d;
  d.file = name_of(path);
  d.step = c.step;
  // CHAPTER.STEP.ncu.csv
  if (!c.step.empty()) d.chapter = c.file.substr(0, c.file.find('.'));
  d.gpu = c.gpu;
  d.compute_capability = c.compute_capability;
  d.dtype = element_type(c.kernels);
  d.problem = problem_key(c.problem);
  d.clocks = c.clocks;
  d.kernels = c.kernels;
  d.processes = c.processes;
  return d;
}

}  // namespace

std::string import_profile(const fs::path& results, const fs::path& counters,
                           const ImportOptions& options) {
  const ResultFile run = read_result_file(results);
  const CounterFile counted = read_counter_file(counters);
  const StepRow& step = find_step(run, options.step.empty() ? counted.step : options.step);
  if (!options.force) {
    if (!run.on_gpu)
      throw InputError(
          fmt::format("{}: is of an emulated run, which ncu cannot have counted "
                      "(--force joins them all the same)",
                      name_of(results)));
    if (const std::string why = mismatch(step_data(run, step), counted); !why.empty())
      throw InputError(fmt::format("{}: is {} as in {} (--force joins them all the same)",
                                   name_of(counters), why, name_of(results)));
  }
  const json document = parse_json(read_bytes(results), name_of(results));
  const auto index = static_cast<std::size_t>(&step - run.steps.data());
  const json profile = {
      {"schema", kSchema},
      {"chapter", document.at("chapter")},
      {"operation", document.at("operation")},
      {"device", document.at("device")},
      {"problem", document.at("problem")},
      {"roofs", document.at("roofs")},
      {"step", document.at("steps").at(index)},
      {"counters", to_json(counted, options.clocks.empty() ? counted.clocks : options.clocks)}};
  // Bytes that are not UTF-8 become the replacement character instead of an exception.
  return profile.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

Profile read_profile(const fs::path& path) {
  return read_profile(parse_json(read_bytes(path), name_of(path)), path);
}

Profile read_profile(const fs::path& path, const std::vector<ResultFile>& runs) {
  if (path.extension() != ".csv") return read_profile(path);
  std::string why = "there are no results";
  for (const ResultFile& run : runs) {
    try {
      return read_profile(parse_json(import_profile(run.path, path, {}), name_of(path)), path);
    } catch (const InputError& e) {
      why = e.what();  // the next results may match
    }
  }
  throw InputError(fmt::format("{}: belongs to none of the results: {}", name_of(path), why));
}

StepData step_data(const ResultFile& r, const StepRow& s) {
  StepData d;
  d.file = name_of(r.path);
  d.chapter = r.chapter;
  d.step = s.name;
  d.gpu = r.gpu;
  d.compute_capability = r.compute_capability;
  d.dtype = std::string(name(r.problem.dtype));
  d.problem = problem_key(r, s);
  d.time = s.time;
  d.predicted_s = s.predicted_s;
  return d;
}

StepData step_data(const Profile& p) {
  StepData d = step_data(p.run, p.step());
  d.clocks = p.counters.clocks;
  d.kernels = p.counters.kernels;
  return d;
}

std::string StepData::title() const {
  return fmt::format("{}{}{} ({})", chapter, chapter.empty() ? "" : " ",
                     step.empty() ? "step not stated" : step, file);
}

std::vector<StepData> read_steps(const fs::path& path, const std::string& step) {
  const std::string file = name_of(path), bytes = utf8_text(read_bytes(path), file);
  const auto first = bytes.find_first_not_of(" \t\r\n");
  std::vector<StepData> steps;
  if (first == bytes.npos || (bytes[first] != '{' && bytes[first] != '[')) {
    steps.push_back(step_data(read_counter_file(path), path));
  } else {
    const json document = parse_json(bytes, file);
    const Object o(document, file, "", "a chapter's JSON, a profile or an ncu CSV");
    const std::string schema = o.choice("schema", {"attn-results-1", std::string_view(kSchema)});
    if (schema == kSchema) {
      steps.push_back(step_data(read_profile(document, path)));
    } else {
      const ResultFile r = read_result_file(path);
      if (!step.empty() || r.steps.empty()) return {step_data(r, find_step(r, step))};
      for (const StepRow& s : r.steps) steps.push_back(step_data(r, s));
      return steps;
    }
  }
  // One step per file. If an export has lost its step name, the option supplies it.
  if (!step.empty() && !steps[0].step.empty() && steps[0].step != step)
    throw InputError(
        fmt::format("{}: has no step {}, but {}", file, printable(step), steps[0].step));
  if (!step.empty()) steps[0].step = printable(step);
  return steps;
}

}  // namespace attn::report
