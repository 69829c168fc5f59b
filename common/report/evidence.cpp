#include "report/evidence.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <sstream>

#include "device/device.h"  // kTimingMethod
#include "report/containers.h"
#include "report/json_object.h"
#include "report/sha256.h"
#include "report/step_sources.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char *kParts = "parts.jsonl", *kUnknown = "unknown";
// What others measured: there is no run of ours that passed. Notes by hand: they have no keys.
constexpr const char *kOthers = "others", *kTried = "tried";

std::string name_of(const Unit& unit) { return unit.part + " " + unit.chapter; }

std::string digest(const fs::path& path) { return sha256(read_bytes(path)).substr(0, 16); }

// "04_flash_v2" of "04_flash_v2.forward_n4096" and of "peers.04_flash_v2.forward".
std::string chapter_of(const std::string& document) {
  std::istringstream words(document);
  std::string word;
  while (std::getline(words, word, '.') && (word == "peers" || word == kOthers)) {
  }
  return word;
}

std::string part_of(const std::string& container) {
  if (container.ends_with(".csv")) return "counters";
  const std::string first = container.substr(0, container.find('.'));
  return first == "peers" || first == kOthers ? first : "times";
}

bool is_of(const std::string& container, const Unit& unit) {
  return part_of(container) == unit.part && chapter_of(container) == unit.chapter;
}

// By what gpu_problems.sh knows a document: its name there.
std::string listed_name(const std::string& part, const std::string& document) {
  return part == "peers" ? document : document.substr(document.find('.') + 1);
}

// The steps of an element of a document, and whether they were launched for it.
std::map<std::string, bool> steps_in(const std::string& part, const std::string& chapter,
                                     const json& element, CodeKeys& code) {
  std::map<std::string, bool> steps;
  const auto add = [&](const json& s) {
    const auto outcome = s.at("outcome").get<std::string>();
    if (outcome != "unsupported" && outcome != "error")
      steps[s.at("name").get<std::string>()] = !s.at("time").is_null() || outcome == "pass";
  };
  if (part == kOthers) {
    for (const auto& [step, time] : element.at("us").items())
      if (code.kernel(chapter, step) != "-") steps[step] = true;
  } else if (part == "peers") {
    for (const json& run : element.at("runs"))
      for (const json& s : run.at("steps")) add(s);
  } else {
    add(element);
  }
  return steps;
}

// The keys of steps as the sources are. What was not launched depends on the launch code alone.
json keys_of(CodeKeys& code, const Unit& unit, const std::map<std::string, bool>& steps) {
  json keys{{"version", kKeyVersion}, {"kernel", json::object()}};
  for (const auto& [step, launched] : steps) {
    if (launched) keys["kernel"][step] = code.kernel(unit.chapter, step);
    if (unit.part != kOthers) keys["launch"][step] = code.launch(unit.chapter, step);
  }
  if (!steps.empty() && unit.part != kOthers) keys["method"] = code.method(unit.part);
  return keys;
}

// Those that a log is of.
std::map<std::string, bool> steps_of_log(CodeKeys& code, const Unit& unit) {
  if (unit.part == "access") return {{"warp_access", true}};
  std::map<std::string, bool> steps;
  for (const std::string& step : code.steps(unit.chapter)) steps[step] = true;
  return steps;
}

// What some lines are true of, compared with the sources.
struct State {
  std::size_t lines = 0, stale = 0;
  std::set<std::string> measured, kernels;  // steps; those whose kernels have changed since
  bool launch_changed = false, launch_unknown = false;
  bool method_changed = false, method_unknown = false;
  std::set<int> methods;  // numbers of the timing method
  bool ours = false;      // by our scripts

  bool older_method() const {
    return std::ranges::any_of(methods, [](int n) { return n != kTimingMethod; });
  }

  void add(CodeKeys& code, const Unit& unit, const std::string& name, const json& line,
           const std::function<bool(const std::string&)>& wanted = {}) {
    const json& keys = line.at("keys");
    if (keys.at("version") != kKeyVersion)
      throw InputError(
          fmt::format("{}: keys of version {}, this attn_report makes {}: build it again", name,
                      keys.at("version").dump(), kKeyVersion));
    bool is_stale = false, any = false;
    const auto differs = [&](const std::string& key, const std::string& now, bool& changed,
                             bool& unknown) {
      if (key == now) return;
      (key == kUnknown ? unknown : changed) = is_stale = true;
    };
    for (const auto& [step, key] : keys.at("kernel").items()) {
      if (wanted && !wanted(step)) continue;
      any = true;
      measured.insert(code_text(step));
      if (key != code.kernel(unit.chapter, step)) kernels.insert(code_text(step)), is_stale = true;
    }
    const json none = json::object();
    for (const auto& [step, key] : (keys.contains("launch") ? keys.at("launch") : none).items()) {
      if (wanted && !wanted(step)) continue;
      any = true;
      differs(key.get<std::string>(), code.launch(unit.chapter, step), launch_changed,
              launch_unknown);
    }
    if (line.contains("verdict"))  // a log: of a step that is new it says nothing
      for (const auto& [step, launched] : steps_of_log(code, unit))
        if (!keys.at("kernel").contains(step))
          measured.insert(code_text(step)), kernels.insert(code_text(step)), is_stale = true;
    if (!any && wanted) return;
    ++lines;
    ours |= keys.contains("method");
    if (keys.contains("method"))
      differs(keys.at("method").get<std::string>(), code.method(unit.part), method_changed,
              method_unknown);
    const std::string options = line.value("options", kUnknown);
    const auto& listed = code.problems(unit.chapter);
    if (options != kUnknown && !listed.empty() &&
        std::ranges::none_of(listed, [&](const ListedProblem& p) {
          return p.part == unit.part && p.name == listed_name(unit.part, name) &&
                 p.options == options;
        }))
      launch_changed = is_stale = true;
    if (measured_time(line)) {
      methods.insert(line.value("timing_method", 1));
      is_stale |= line.value("timing_method", 1) != kTimingMethod;
    }
    stale += is_stale;
  }

  // "`v7_grid` has changed since", "kernels of 3 of 9 steps have changed since" ...: all that is
  // stale, or nothing.
  std::string text() const {
    std::vector<std::string> all;
    if (!kernels.empty() && kernels == measured && kernels.size() > 2)
      all.push_back("kernels of every step have changed since");
    else if (kernels.size() > 3)
      all.push_back(fmt::format("kernels of {} of {} steps have changed since", kernels.size(),
                                measured.size()));
    else if (!kernels.empty())
      all.push_back(fmt::format("{} {} changed since", fmt::join(kernels, ", "),
                                kernels.size() == 1 ? "has" : "have"));
    if (launch_changed) all.push_back("launch code has changed since");
    if (method_changed) all.push_back("the way of measuring has changed since");
    const bool both = launch_unknown && method_unknown;
    if (launch_unknown || method_unknown)
      all.push_back(fmt::format("{}{}{} unknown", launch_unknown ? "launch code" : "",
                                both ? " and " : "", method_unknown ? "way of measuring" : ""));
    return fmt::format("{}", fmt::join(all, "; "));
  }

 private:
  static std::string code_text(const std::string& step) { return report::code(step); }
  // Is there a time of ours in it?
  static bool measured_time(const json& line) {
    if (line.contains("steps")) return !line.at("steps").at(0).value("time", json()).is_null();
    return line.contains("problems") && line.at("problems").is_array();
  }
};

// The lines of parts.jsonl, by unit.
std::map<std::string, json> read_parts(const fs::path& folder) {
  std::map<std::string, json> parts;
  for (const EvidenceLine& line : read_lines(folder / kParts)) parts[line.name] = line.json();
  return parts;
}

void write_parts(const fs::path& folder, const std::map<std::string, json>& parts) {
  std::vector<EvidenceLine> lines;
  for (const auto& [name, part] : parts) lines.push_back(make_line(name, part));
  write_lines(folder / kParts, lines);
}

Unit unit_of(const std::string& name) {
  return {name.substr(0, name.find(' ')), name.substr(name.find(' ') + 1)};
}

json digests(const fs::path& folder, const Unit& unit, const std::vector<std::string>& logs) {
  json files = json::object();
  for (const std::string& container : containers(folder))
    if (is_of(container, unit)) files[container] = digest(folder / container);
  for (const std::string& log : logs) files[log] = digest(folder / log);
  return files;
}

// The order of lines in a container: problems as they are listed, steps as in a ladder.
void sort_lines(std::vector<EvidenceLine>& lines, const std::string& part,
                const std::vector<ListedProblem>& listed) {
  if (part == kOthers) return;
  std::map<std::string, std::size_t> place;
  for (const ListedProblem& p : listed)
    if (p.part == part) place.emplace(part == "peers" ? p.options : p.name, place.size());
  const auto key = [&](const EvidenceLine& line) {
    std::string name = listed_name(part, line.name);
    if (part == "counters") return std::tuple(std::size_t{0}, std::string(), place_of(name));
    const json j = line.json();
    if (part == "peers") name = j.value("options", kUnknown);
    const auto found = place.find(name);
    return std::tuple(
        found == place.end() ? listed.size() : found->second,
        part == "peers" ? std::string() : name,
        part == "peers" ? std::pair(std::size_t{0}, 0) : place_of(j.at("steps").at(0).at("name")));
  };
  std::vector<std::pair<decltype(key(lines[0])), EvidenceLine>> keyed;
  for (EvidenceLine& line : lines) keyed.emplace_back(key(line), std::move(line));
  std::ranges::stable_sort(keyed, {}, [](const auto& k) { return k.first; });
  lines.clear();
  for (auto& [k, line] : keyed) lines.push_back(std::move(line));
}

// Puts `fresh` in place of the lines for which `replaced` holds: where the first one stood.
template <class Replaced>
void replace_lines(const fs::path& path, std::vector<EvidenceLine> fresh, const std::string& part,
                   const std::vector<ListedProblem>& listed, const Replaced& replaced) {
  std::vector<EvidenceLine> lines;
  for (const EvidenceLine& line : read_lines(path))
    if (!replaced(line)) lines.push_back(line);
  std::ranges::move(fresh, std::back_inserter(lines));
  sort_lines(lines, part, listed);
  if (lines.empty())
    fs::remove(path);
  else
    write_lines(path, lines);
}

std::string step_of(const json& line) { return line.at("steps").at(0).at("name"); }

// Rows of ncu with the step in front, and what stands above them.
EvidenceLine counters_line(const std::string& name, const fs::path& file, json line) {
  constexpr std::string_view kSays = "==profile.sh== ";
  const std::string step = name.substr(name.find('.') + 1);
  std::istringstream text(read_bytes(file));
  std::string rows, header;
  for (std::string row; std::getline(text, row);) {
    if (row.starts_with(kSays)) {
      const std::string said = row.substr(kSays.size());
      line[said.substr(0, said.find(':'))] = said.substr(said.find(": ") + 2);
    } else if (header.empty()) {
      header = row;
    } else {
      rows += fmt::format("\"{}\",{}\n", step, row);
    }
  }
  return make_line(name, line, rows);
}

// Not measurements: what describes them.
bool is_evidence(const std::string& name) {
  return name != kParts && name != "README.md" && !name.ends_with(".new");
}

fs::path root_of(const fs::path& folder) {
  return fs::weakly_canonical(fs::absolute(folder) / "../../..");
}

// Of the project that a folder lies in, once: a page has many tables.
CodeKeys* keys_around(const fs::path& folder) {
  static std::map<fs::path, std::unique_ptr<CodeKeys>> known;
  const fs::path root = root_of(folder);
  if (!fs::exists(root / "common/attn/kernel.h")) return nullptr;
  auto& keys = known[root];
  if (!keys) keys = std::make_unique<CodeKeys>(root);
  return keys.get();
}

// Calls take(unit, document, line) for every line of the folder, of logs with an empty document.
template <class Take>
void for_each_line(const fs::path& folder, const Take& take) {
  for (const std::string& container : containers(folder))
    for (const EvidenceLine& line : read_lines(folder / container))
      take(Unit{part_of(container), chapter_of(container)}, line.name, line.json());
  for (const auto& [name, part] : read_parts(folder))
    if (part.contains("keys")) take(unit_of(name), std::string(), part);
}

std::map<std::string, State> states(const fs::path& folder, CodeKeys& code) {
  std::map<std::string, State> all;
  for_each_line(folder, [&](const Unit& unit, const std::string& name, const json& line) {
    all[name_of(unit)].add(code, unit, name, line);
  });
  return all;
}

// What a chapter must have and lacks, a line each: parts, problems that are listed, steps.
std::vector<std::string> missing(const fs::path& folder, CodeKeys& code) {
  std::map<std::string, std::set<std::string>> problems, options, steps;  // by unit
  for_each_line(folder, [&](const Unit& unit, const std::string& name, const json& line) {
    problems[name_of(unit)].insert(listed_name(unit.part, name));
    options[name_of(unit)].insert(line.value("options", kUnknown));
    for (const auto& [step, key] : line.at("keys").at("kernel").items())
      steps[name_of(unit)].insert(step);
  });
  const std::map<std::string, json> parts = read_parts(folder);
  std::vector<std::string> all;
  const auto add = [&](const std::string& chapter, const char* what,
                       const std::vector<std::string>& names) {
    constexpr std::size_t kNamed = 6;
    std::string text;
    for (std::size_t n = 0; n < std::min(names.size(), kNamed); ++n)
      text += (n > 0 ? ", " : "") + names[n];
    if (names.size() > kNamed) text += fmt::format(" and {} more", names.size() - kNamed);
    if (!names.empty()) all.push_back(fmt::format("{}: {} {}", chapter, what, text));
  };
  for (const std::string& chapter : code.chapters()) {
    std::vector<std::string> needed{"tests", "access"}, lacks, unmeasured;
    if (chapter != "common") needed = {"times", "counters", "tests", "sanitizer", "large", "peers"};
    for (const std::string& part : needed)
      if (!parts.contains(part + " " + chapter)) lacks.push_back(part);
    add(chapter, "has no", lacks);
    if (const std::set<std::string>& of_peers = options["peers " + chapter];
        parts.contains("peers " + chapter) && !of_peers.contains(kUnknown)) {
      unmeasured.clear();
      for (const ListedProblem& p : code.problems(chapter))
        if (p.part == "peers" && !of_peers.contains(problem_options(p.options)))
          unmeasured.push_back(p.name + " " + p.options);
      add(chapter, "problems without peers:", unmeasured);
    }
    for (const std::string part : {"times", "counters"}) {
      std::vector<std::string> names;
      for (const ListedProblem& p : code.problems(chapter))
        if (part == "times" && p.part == part && !problems[part + " " + chapter].contains(p.name))
          names.push_back(p.name);
      if (parts.contains(part + " " + chapter)) add(chapter, "problems without times:", names);
      unmeasured.clear();
      for (const std::string& step : code.steps(chapter))
        if (!steps[part + " " + chapter].contains(step)) unmeasured.push_back(step);
      if (parts.contains(part + " " + chapter))
        add(chapter,
            part == "times" ? "steps without times:" : "steps without counters:", unmeasured);
    }
  }
  return all;
}

// Were all of its measurements made by others?
bool only_others(const fs::path& folder) {
  return std::ranges::all_of(read_parts(folder),
                             [](const auto& part) { return unit_of(part.first).part == kOthers; });
}

}  // namespace

void record(const fs::path& folder, CodeKeys& code, const Unit& unit, const std::string& name,
            const fs::path& file, const std::vector<std::string>& options, const json& measured) {
  std::vector<EvidenceLine> lines;
  std::set<std::string> fresh;  // steps, or options, that the lines are of
  fs::path container = folder / (name + ".jsonl");
  if (unit.part == "counters") {
    const std::string step = name.substr(name.find('.') + 1);
    container = folder / (unit.chapter + ".counters.csv");
    json line{{"keys", keys_of(code, unit, {{step, true}})}, {"measured", measured}};
    line["options"] = options.empty() ? kUnknown : problem_options(options[0]);
    line["measured"]["checked"] = false;
    lines.push_back(counters_line(name, file, std::move(line)));
  } else {
    const json document = read_json(file);
    if (document.contains("keys") || document.contains("measured"))
      throw InputError(fmt::format("{}: is evidence, not what a program wrote", file.string()));
    const std::string array = array_of(document);
    if (unit.part == "times")
      container = folder / fmt::format("{}.{}.jsonl", unit.chapter,
                                       document.at("operation").get<std::string>());
    std::size_t n = 0;
    for (const json& element : document.at(array)) {
      json line = document;
      line[array] = json::array({element});
      line["keys"] = keys_of(code, unit, steps_in(unit.part, unit.chapter, element, code));
      line["measured"] = measured;
      if (line.contains("device") && line["device"].contains("cuda_runtime")) {
        const int version = line["device"]["cuda_runtime"];
        line["measured"]["cuda"] = fmt::format("{}.{}", version / 1000, version % 1000 / 10);
      }
      line["measured"]["checked"] = unit.part == "times"
                                        ? element.at("outcome") == "pass"
                                        : !element.value("output_differences", json()).empty();
      const std::size_t own = unit.part == "peers" ? n++ : 0;
      line["options"] = own < options.size() ? problem_options(options[own]) : kUnknown;
      fresh.insert(unit.part == "times" ? step_of(line) : line["options"].get<std::string>());
      lines.push_back(make_line(name, line));
    }
  }
  replace_lines(container, std::move(lines), unit.part, code.problems(unit.chapter),
                [&](const EvidenceLine& line) {
                  if (line.name != name) return false;
                  if (unit.part != "times" && unit.part != "peers") return true;
                  const json j = line.json();
                  const std::string before = j.value("options", kUnknown);
                  return before == kUnknown && unit.part == "peers"
                             ? true
                             : fresh.contains(unit.part == "times" ? step_of(j) : before);
                });
  // Until the part has ended its files are those of a run that goes on.
  std::map<std::string, json> parts = read_parts(folder);
  json& part = parts[name_of(unit)];
  part["files"] = digests(folder, unit, {});
  part["verdict"] = "not finished";
  part.emplace("seconds", 60);
  write_parts(folder, parts);
}

void finish(const fs::path& folder, CodeKeys& code, const Unit& unit, const std::string& verdict,
            int seconds, const std::vector<std::string>& logs, const json& measured) {
  const auto& listed = code.problems(unit.chapter);
  if (verdict == "passed" && !listed.empty() && unit.part != kOthers && unit.part != kTried)
    for (const std::string& container : containers(folder))
      if (is_of(container, unit))
        replace_lines(folder / container, {}, unit.part, listed, [&](const EvidenceLine& line) {
          const json j = line.json();
          const std::string options = j.value("options", kUnknown);
          return (unit.part == "times" && code.kernel(unit.chapter, step_of(j)) == "-") ||
                 std::ranges::none_of(listed, [&](const ListedProblem& p) {
                   return p.part == unit.part && p.name == listed_name(unit.part, line.name) &&
                          (unit.part != "peers" || options == kUnknown || options == p.options);
                 });
        });
  std::map<std::string, json> parts = read_parts(folder);
  json part{{"verdict", verdict},
            {"seconds", seconds},
            {"files", digests(folder, unit, logs)},
            {"measured", measured}};
  if (!logs.empty() && unit.part != kTried)
    part["keys"] = keys_of(code, unit, steps_of_log(code, unit));
  parts[name_of(unit)] = part;
  write_parts(folder, parts);
}

std::vector<std::string> edited_evidence(const fs::path& folder) {
  if (!fs::exists(folder / kParts))
    throw InputError(fmt::format("{}: has no {}", folder.string(), kParts));
  std::vector<std::string> wrong;
  std::set<std::string> known;
  for (const EvidenceLine& line : read_lines(folder / kParts)) {
    if (!line.intact()) wrong.push_back(fmt::format("{}: {}: was edited", kParts, line.name));
    const json part = line.json();
    if (part.at("verdict") != "passed")
      wrong.push_back(
          fmt::format("{}: {}: {}", kParts, line.name, part.at("verdict").get<std::string>()));
    for (const auto& [name, sum] : part.at("files").items()) {
      known.insert(name);
      if (!fs::exists(folder / name))
        wrong.push_back(fmt::format("{}: gone since it was measured", name));
      else if (digest(folder / name) != sum)
        wrong.push_back(fmt::format("{}: not as it was measured", name));
    }
  }
  for (const std::string& container : containers(folder))
    for (const EvidenceLine& line : read_lines(folder / container))
      if (!line.intact()) wrong.push_back(fmt::format("{}: {}: was edited", container, line.name));
  for (const auto& entry : fs::directory_iterator(folder))
    if (const std::string name = entry.path().filename().string();
        is_evidence(name) && !known.contains(name))
      wrong.push_back(fmt::format("{}: no part has such a file", name));
  return wrong;
}

std::vector<std::string> stale_evidence(const fs::path& folder, CodeKeys& code) {
  std::vector<std::string> all;
  for (const auto& [name, state] : states(folder, code)) {
    if (state.stale == 0) continue;
    std::string text = state.text();
    if (state.older_method())
      text += fmt::format("{}timing method {}", text.empty() ? "" : "; ",
                          fmt::join(state.methods, " and "));
    all.push_back(
        fmt::format("{}: {} of {} lines stale: {}", name, state.stale, state.lines, text));
  }
  if (!only_others(folder)) std::ranges::move(missing(folder, code), std::back_inserter(all));
  return all;
}

std::string state_of(const fs::path& folder, const std::vector<std::string>& documents,
                     const std::string& table, CodeKeys* keys) {
  if (!fs::exists(folder / kParts)) return "";
  if (!keys) keys = keys_around(folder);
  if (!keys) return "";
  std::vector<std::pair<Unit, EvidenceLine>> lines;
  std::set<std::string> found, steps;
  const std::set<std::string> wanted(documents.begin(), documents.end());
  for (const std::string& container : containers(folder)) {
    const std::string begin = container.substr(0, container.find('.') + 1);
    const auto first = wanted.lower_bound(begin);
    if (first == wanted.end() || !first->starts_with(begin)) continue;
    for (const EvidenceLine& line : read_lines(folder / container))
      if (wanted.contains(line.name)) {
        lines.emplace_back(Unit{part_of(container), chapter_of(container)}, line);
        found.insert(line.name);
      }
  }
  for (const std::string& name : documents)
    if (!found.contains(name)) return fmt::format("State: {} is no evidence.", name);
  const auto named = [&](const std::string& step) { return table.find(code(step)) != table.npos; };
  std::vector<json> parsed;
  bool names_steps = false;
  for (const auto& [unit, line] : lines) {
    parsed.push_back(line.json());
    for (const auto& [step, key] : parsed.back().at("keys").at("kernel").items())
      names_steps |= named(step);
  }
  State state;
  for (std::size_t n = 0; n < lines.size(); ++n)
    state.add(*keys, lines[n].first, lines[n].second.name, parsed[n],
              names_steps ? named : std::function<bool(const std::string&)>());
  std::string text = state.text();
  if (state.measured.empty()) {
    text = "computed; nothing was launched" + (text.empty() ? "" : "; " + text);
  } else if (text.empty()) {
    text = state.ours ? "measured on the code as it is" : "measured on the kernels as they are";
  }
  if (!state.methods.empty())
    text = fmt::format("timing method{} {}{}; {}", state.methods.size() == 1 ? "" : "s",
                       fmt::join(state.methods, " and "),
                       state.methods.contains(1)   ? " (1 counts the host's time to launch)"
                       : state.methods.contains(2) ? " (2 has one more event before the kernel)"
                                                   : "",
                       text);
  return fmt::format("State: {}.", text);
}

std::string state_table(const fs::path& folder, CodeKeys* keys) {
  if (!keys) keys = keys_around(folder);
  if (!fs::exists(folder / kParts) || !keys)
    throw NotMeasured(fmt::format("{}: no {} yet", folder.string(), kParts));
  std::map<std::pair<std::string, std::string>, State> rows;
  for (const auto& [name, state] : states(folder, *keys))
    rows[{unit_of(name).chapter, unit_of(name).part}] = state;
  Grid grid;
  const auto known = [](bool changed, bool unknown) {
    return changed ? "changed" : unknown ? "unknown" : "current";
  };
  for (const auto& [unit, state] : rows) {
    const bool ours = unit.second != kOthers;
    grid.add_row();
    grid.add("chapter", "chapter", unit.first);
    grid.add("part", "part", unit.second);
    grid.add("lines", "lines", std::to_string(state.lines));
    grid.add("kernels", "kernels changed since",
             state.kernels.empty() ? "none"
             : state.kernels.size() > 3 || state.kernels == state.measured
                 ? fmt::format("{} of {}", state.kernels.size(), state.measured.size())
                 : fmt::format("{}", fmt::join(state.kernels, ", ")));
    grid.add("launch", "launch code",
             ours ? known(state.launch_changed, state.launch_unknown) : "-");
    grid.add("method", "way of measuring",
             ours ? known(state.method_changed, state.method_unknown) : "not by our scripts");
    grid.add("number", "timing method",
             state.methods.empty() ? "-" : fmt::format("{}", fmt::join(state.methods, ", ")));
  }
  std::string text = grid.markdown();
  if (only_others(folder)) return text;
  for (const std::string& line : missing(folder, *keys)) text += fmt::format("\n* {}", line);
  return text + (text.ends_with("\n") ? "" : "\n");
}

std::vector<std::string> to_measure(const fs::path& folder, CodeKeys& code, const Unit& unit,
                                    const std::string& name,
                                    const std::vector<std::string>& steps) {
  const std::vector<std::string> all{"all"};
  std::map<std::string, bool> stale;  // by step, of those that have a line
  std::set<std::string> known;        // steps of the chapter's other documents
  for_each_line(folder, [&](const Unit& of, const std::string& document, const json& line) {
    if (name_of(of) != name_of(unit)) return;
    const bool own = document == name;
    State state;
    state.add(code, unit, document, line);
    const std::string step = unit.part == "times" ? step_of(line) : "";
    known.insert(step);
    if (own) stale[step] = state.stale > 0;
  });
  if (stale.empty()) return all;
  std::vector<std::string> again;
  if (!steps.empty()) {
    for (const std::string& step : steps)
      if (!stale.contains(step) || stale[step]) again.push_back(step);
    return again.size() == steps.size() ? all : again;
  }
  // The program decides which steps the problem is for: one that is new may be among them.
  if (unit.part == "times")
    for (const std::string& step : code.steps(unit.chapter))
      if (!known.contains(step)) return all;
  for (const auto& [step, is_stale] : stale)
    if (is_stale) again.push_back(step);
  return again.size() == stale.size() ? all : again;
}

std::vector<std::string> peers_to_measure(const fs::path& folder, CodeKeys& code, const Unit& unit,
                                          const std::string& name,
                                          const std::vector<std::string>& options) {
  std::set<std::string> current;
  for_each_line(folder, [&](const Unit&, const std::string& document, const json& line) {
    if (document != name) return;
    State state;
    state.add(code, unit, name, line);
    if (state.stale == 0) current.insert(line.value("options", kUnknown));
  });
  std::vector<std::string> again;
  for (const std::string& problem : options)
    if (!current.contains(problem_options(problem))) again.push_back(problem);
  return again;
}

// Whether a problem of the list, or for times a step of the chapter, has no line yet.
static bool lacks_lines(const fs::path& folder, CodeKeys& code, const Unit& unit) {
  if (unit.part != "times" && unit.part != "counters" && unit.part != "peers") return false;
  std::set<std::string> names, options, steps;
  for_each_line(folder, [&](const Unit& of, const std::string& document, const json& line) {
    if (name_of(of) != name_of(unit)) return;
    names.insert(listed_name(unit.part, document));
    options.insert(line.value("options", kUnknown));
    if (unit.part == "times") steps.insert(step_of(line));
  });
  for (const ListedProblem& p : code.problems(unit.chapter)) {
    if (p.part != unit.part) continue;
    if (!names.contains(p.name)) return true;
    if (unit.part == "peers" && !options.contains(kUnknown) &&
        !options.contains(problem_options(p.options)))
      return true;
  }
  return unit.part == "times" && std::ranges::any_of(code.steps(unit.chapter), [&](auto& step) {
           return !steps.contains(step);
         });
}

std::vector<TimedUnit> stalest_first(const fs::path& folder, CodeKeys& code,
                                     const std::vector<Unit>& units, bool all) {
  const std::map<std::string, State> now = states(folder, code);
  const std::map<std::string, json> parts = read_parts(folder);
  std::vector<std::pair<int, TimedUnit>> ranked;
  for (const Unit& unit : units) {
    const auto part = parts.find(name_of(unit));
    const auto state = now.find(name_of(unit));
    int rank = 3;
    if (part == parts.end() || part->second.at("verdict") != "passed")
      rank = 0;
    else if (state == now.end())
      rank = 3;
    else if (!state->second.kernels.empty())
      rank = 1;
    else if (state->second.stale > 0)
      rank = 2;
    if (rank == 3 && lacks_lines(folder, code, unit)) rank = 0;
    const int seconds = part == parts.end() ? 60 : part->second.value("seconds", 60);
    if (all || rank < 3) ranked.emplace_back(rank, TimedUnit{unit, seconds});
  }
  std::ranges::stable_sort(ranked, {}, [](const auto& r) { return r.first; });
  std::vector<TimedUnit> order;
  for (auto& [rank, unit] : ranked) order.push_back(std::move(unit));
  return order;
}

}  // namespace attn::report
