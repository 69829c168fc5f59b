// The state of the lines of an evidence folder: stale or current, missing, what to measure next.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <ranges>
#include <set>

#include "device/device.h"  // kTimingMethod
#include "report/evidence_lines.h"
#include "report/json_object.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The state of some lines compared with the sources.
struct State {
  std::size_t lines = 0, stale = 0;
  std::set<std::string> measured, kernels;  // steps; steps with changed kernels
  std::set<std::string> added;              // steps of which a log says nothing: they are new
  bool launch_changed = false, launch_unknown = false;
  bool method_changed = false, method_unknown = false;
  std::set<int> methods;  // timing method numbers
  bool ours = false;      // measured by our scripts

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
    if (line.contains("verdict"))
      for (const auto& [step, launched] : steps_of_log(code, unit))
        if (!keys.at("kernel").contains(step)) added.insert(code_text(step)), is_stale = true;
    if (!any && wanted) return;
    ++lines;
    ours |= keys.contains("method");
    if (keys.contains("method") || unit.part == "calls") {
      const std::string now = code.method(unit.part, unit.chapter, name);
      std::string then = keys.value("method", kUnknown);
      if (then == "-" && now != "-") then = kUnknown;  // the part had no such key
      differs(then, now, method_changed, method_unknown);
    }
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

  static constexpr std::size_t kNamed = 6;  // more steps are counted
  // "`v7_grid` has changed since", "kernels of 3 of 9 steps have changed since" ...: the stale
  // parts, or nothing.
  std::string text() const {
    std::vector<std::string> all;
    if (!kernels.empty() && kernels == measured && kernels.size() > 2)
      all.push_back("kernels of every step have changed since");
    else if (kernels.size() > kNamed)
      all.push_back(fmt::format("kernels of {} of {} steps have changed since", kernels.size(),
                                measured.size()));
    else if (!kernels.empty())
      all.push_back(fmt::format("{} {} changed since", fmt::join(kernels, ", "),
                                kernels.size() == 1 ? "has" : "have"));
    if (added.size() > 3)
      all.push_back(fmt::format("{} steps are new", added.size()));
    else if (!added.empty())
      all.push_back(
          fmt::format("{} {} new", fmt::join(added, ", "), added.size() == 1 ? "is" : "are"));
    if (launch_changed) all.push_back("launch code has changed since");
    if (method_changed) all.push_back("the way of measuring has changed since");
    const bool both = launch_unknown && method_unknown;
    if (launch_unknown || method_unknown)
      all.push_back(fmt::format("{}{}{} unknown", launch_unknown ? "launch code" : "",
                                both ? " and " : "", method_unknown ? "way of measuring" : ""));
    return fmt::format("{}", fmt::join(all, "; "));
  }

  // The same as sentences for readers of a page: "Measured before the latest change to the kernels
  // of 10 of 16 steps and to the launch code."
  std::string sentences() const {
    std::vector<std::string> changed, unknown;
    if (!kernels.empty() && kernels == measured && kernels.size() > 2)
      changed.push_back("to the kernels of all steps");
    else if (kernels.size() > kNamed)
      changed.push_back(
          fmt::format("to the kernels of {} of {} steps", kernels.size(), measured.size()));
    else if (!kernels.empty())
      changed.push_back("to " + list_of({kernels.begin(), kernels.end()}));
    if (launch_changed) changed.push_back("to the launch code");
    if (method_changed) changed.push_back("to the way of measuring");
    if (launch_unknown && !launch_changed) unknown.push_back("the launch code");
    if (method_unknown && !method_changed) unknown.push_back("the way of measuring");
    std::string text = measured.empty() ? "Computed without a launch" : "Measured";
    if (!changed.empty())
      text += " before the latest change " + list_of(changed);
    else if (!measured.empty())
      text += ours && unknown.empty() ? " on the present code" : " on the present kernels";
    if (!unknown.empty())
      text += fmt::format("; whether {} {} changed since is not recorded", list_of(unknown),
                          unknown.size() == 1 ? "has" : "have");
    text += ".";
    if (older_method()) {
      const int oldest = *methods.begin();
      text += fmt::format(" {} include {} (timing method {}: docs/results_schema.md).",
                          methods.size() == 1 ? "Step times" : "Some step times",
                          oldest == 1 ? "the host's time to launch"
                          : oldest == 2
                              ? "timing events before and between kernels, up to 1.6 \u00b5s each"
                              : "timing events between kernels, up to 1.6 \u00b5s each",
                          oldest);
    }
    return text;
  }

 private:
  // "a", "a and b", "a, b and c".
  static std::string list_of(const std::vector<std::string>& all) {
    std::string text;
    for (std::size_t n = 0; n < all.size(); ++n)
      text += (n == 0 ? "" : n + 1 == all.size() ? " and " : ", ") + all[n];
    return text;
  }
  static std::string code_text(const std::string& step) { return report::code(step); }
  // Whether it contains a time measured by us.
  static bool measured_time(const json& line) {
    if (line.contains("steps")) return !line.at("steps").at(0).value("time", json()).is_null();
    return line.contains("problems") && line.at("problems").is_array();
  }
};

fs::path root_of(const fs::path& folder) {
  return fs::weakly_canonical(fs::absolute(folder) / "../../..");
}

// The keys of the project that contains a folder, cached since a page has many tables.
CodeKeys* keys_around(const fs::path& folder) {
  static std::map<fs::path, std::unique_ptr<CodeKeys>> known;
  const fs::path root = root_of(folder);
  if (!fs::exists(root / "common/attn/kernel.h")) return nullptr;
  auto& keys = known[root];
  if (!keys) keys = std::make_unique<CodeKeys>(root);
  return keys.get();
}

std::map<std::string, State> states(const fs::path& folder, CodeKeys& code) {
  std::map<std::string, State> all;
  for_each_line(folder, [&](const Unit& unit, const std::string& name, const json& line) {
    all[name_of(unit)].add(code, unit, name, line);
  });
  return all;
}

// Whether several_gpus.sh measures a step, which needs several GPUs: neither times nor ncu can.
bool on_ranks(const std::map<std::string, json>& parts, const std::string& chapter,
              const std::string& step) {
  const auto part = parts.find("ranks " + chapter);
  return part != parts.end() && step.starts_with("p") &&
         part->second.value("keys", json::object()).value("kernel", json::object()).contains(step);
}

// The steps of a line of peers, also those that refused its problem.
std::set<std::string> steps_beside_peers(const json& line) {
  std::set<std::string> steps;
  for (const json& problem : line.value("problems", json::array()))
    for (const json& run : problem.value("runs", json::array()))
      for (const json& step : run.value("steps", json::array()))
        steps.insert(step.value("name", kUnknown));
  return steps;
}
bool all_in(const std::vector<std::string>& names, const std::set<std::string>& all) {
  return std::ranges::all_of(names, [&](const std::string& name) { return all.contains(name); });
}

// Whether a listed problem of peers names a step.
bool listed_beside_peers(CodeKeys& code, const std::string& chapter, const std::string& step) {
  return std::ranges::any_of(code.problems(chapter), [&](const ListedProblem& p) {
    return p.part == "peers" && std::ranges::count(p.steps, step) > 0;
  });
}

// Measurements that a chapter requires but lacks, one line each: parts, listed problems, steps.
std::vector<std::string> missing(const fs::path& folder, CodeKeys& code) {
  std::map<std::string, std::set<std::string>> problems, options, steps;  // by unit
  std::map<std::string, std::set<std::string>> beside_peers;              // steps by chapter
  for_each_line(folder, [&](const Unit& unit, const std::string& name, const json& line) {
    problems[name_of(unit)].insert(listed_name(unit.part, name));
    options[name_of(unit)].insert(line.value("options", kUnknown));
    if (unit.part == "peers") beside_peers[unit.chapter].merge(steps_beside_peers(line));
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
    std::vector<std::string> needed{"tests", "access", "calls"}, lacks, unmeasured;
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
      unmeasured.clear();
      for (const std::string& step : code.steps(chapter))
        if (listed_beside_peers(code, chapter, step) && !beside_peers[chapter].contains(step))
          unmeasured.push_back(step);
      add(chapter, "steps without peers:", unmeasured);
    }
    for (const std::string part : {"times", "counters"}) {
      std::vector<std::string> names;
      for (const ListedProblem& p : code.problems(chapter))
        if (part == "times" && p.part == part && !problems[part + " " + chapter].contains(p.name))
          names.push_back(p.name);
      if (parts.contains(part + " " + chapter)) add(chapter, "problems without times:", names);
      unmeasured.clear();
      for (const std::string& step : code.steps(chapter))
        if (!steps[part + " " + chapter].contains(step) && !on_ranks(parts, chapter, step))
          unmeasured.push_back(step);
      if (parts.contains(part + " " + chapter))
        add(chapter,
            part == "times" ? "steps without times:" : "steps without counters:", unmeasured);
    }
  }
  return all;
}

// Whether all of its measurements come from third parties.
bool only_others(const fs::path& folder) {
  return std::ranges::all_of(read_parts(folder),
                             [](const auto& part) { return unit_of(part.first).part == kOthers; });
}

// Whether a listed problem has no line yet, or none of one of its steps; for times, whether a step
// of the chapter has none.
bool lacks_lines(const fs::path& folder, CodeKeys& code, const Unit& unit) {
  if (unit.part != "times" && unit.part != "counters" && unit.part != "peers") return false;
  std::set<std::string> names, steps;
  std::map<std::string, std::set<std::string>> options;  // and the steps of peers
  for_each_line(folder, [&](const Unit& of, const std::string& document, const json& line) {
    if (name_of(of) != name_of(unit)) return;
    names.insert(listed_name(unit.part, document));
    options[line.value("options", kUnknown)].merge(
        unit.part == "peers" ? steps_beside_peers(line) : std::set<std::string>{});
    if (unit.part == "times") steps.insert(step_of(line));
  });
  for (const ListedProblem& p : code.problems(unit.chapter)) {
    if (p.part != unit.part) continue;
    if (!names.contains(p.name)) return true;
    if (unit.part != "peers" || options.contains(kUnknown)) continue;
    std::vector<std::string> listed = p.steps;  // without patterns of steps_like
    std::erase_if(listed, [&](const std::string& step) {
      return !std::ranges::count(code.steps(unit.chapter), step);
    });
    const auto measured = options.find(problem_options(p.options));
    if (measured == options.end() || !all_in(listed, measured->second)) return true;
  }
  const std::map<std::string, json> parts = read_parts(folder);
  return unit.part == "times" && std::ranges::any_of(code.steps(unit.chapter), [&](auto& step) {
           return !steps.contains(step) && !on_ranks(parts, unit.chapter, step);
         });
}

}  // namespace

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
    if (!found.contains(name)) return fmt::format("No stored measurement is called {}.", name);
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
  return state.sentences();
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
    std::string kernels = "none";
    if (state.kernels.size() > 3 || (!state.kernels.empty() && state.kernels == state.measured))
      kernels = fmt::format("{} of {}", state.kernels.size(), state.measured.size());
    else if (!state.kernels.empty())
      kernels = fmt::format("{}", fmt::join(state.kernels, ", "));
    if (!state.added.empty())
      kernels =
          fmt::format("{}{} new", state.kernels.empty() ? "" : kernels + ", ", state.added.size());
    grid.add("kernels", "kernels changed since", kernels);
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
  std::map<std::string, bool> stale;  // by step, for steps with a line
  std::set<std::string> known;        // steps of the chapter's other documents
  for_each_line(
      folder,
      [&](const Unit&, const std::string& document, const json& line) {
        const std::string step = unit.part == "times" ? step_of(line) : "";
        known.insert(step);
        if (document != name) return;
        State state;
        state.add(code, unit, document, line);
        stale[step] = state.stale > 0;
      },
      &unit);
  if (stale.empty()) return all;
  std::vector<std::string> again;
  if (!steps.empty()) {
    for (const std::string& step : steps)
      if (!stale.contains(step) || stale[step]) again.push_back(step);
    return again.size() == steps.size() ? all : again;
  }
  // The program selects the steps for the problem; a new step may be among them, if its ladder
  // (the letter of its name) is, or is new, too.
  const auto has_ladder_of = [](const std::string& step) {
    return [&](const std::string& other) { return other.substr(0, 1) == step.substr(0, 1); };
  };
  const std::map<std::string, json> parts = read_parts(folder);
  if (unit.part == "times")
    for (const std::string& step : code.steps(unit.chapter))
      if (!known.contains(step) && !on_ranks(parts, unit.chapter, step) &&
          (std::ranges::any_of(std::views::keys(stale), has_ladder_of(step)) ||
           std::ranges::none_of(known, has_ladder_of(step))))
        return all;
  for (const auto& [step, is_stale] : stale)
    if (is_stale) again.push_back(step);
  return again.size() == stale.size() ? all : again;
}

std::vector<std::string> peers_to_measure(const fs::path& folder, CodeKeys& code, const Unit& unit,
                                          const std::string& name,
                                          const std::vector<std::string>& options) {
  std::map<std::string, std::set<std::string>> current;  // steps by options
  for_each_line(
      folder,
      [&](const Unit&, const std::string& document, const json& line) {
        if (document != name) return;
        State state;
        state.add(code, unit, name, line);
        if (state.stale > 0) return;
        current[line.value("options", kUnknown)].merge(steps_beside_peers(line));
      },
      &unit);
  std::vector<std::string> again;
  for (const std::string& problem : options) {
    const auto measured = current.find(problem_options(problem));
    if (measured == current.end() || !all_in(steps_option(problem), measured->second))
      again.push_back(problem);
  }
  return again;
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
    else if (!state->second.kernels.empty() || !state->second.added.empty())
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
