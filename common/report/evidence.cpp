#include "report/evidence.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <sstream>

#include "report/containers.h"
#include "report/evidence_lines.h"
#include "report/json_object.h"
#include "report/sha256.h"
#include "report/step_sources.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string digest(const fs::path& path) { return sha256(read_bytes(path)).substr(0, 16); }

// The steps of an element of a document, and whether each was launched for it.
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

// The keys of steps in the current sources. For steps that were not launched, only the launch code
// matters.
json keys_of(CodeKeys& code, const Unit& unit, const std::map<std::string, bool>& steps,
             const std::string& document = {}) {
  json keys{{"version", kKeyVersion}, {"kernel", json::object()}};
  for (const auto& [step, launched] : steps) {
    if (launched) keys["kernel"][step] = code.kernel(unit.chapter, step);
    if (unit.part != kOthers) keys["launch"][step] = code.launch(unit.chapter, step);
  }
  // The calls of libattention are of no step, and depend on its host code alone.
  if ((!steps.empty() && unit.part != kOthers) || unit.part == "calls")
    keys["method"] = code.method(unit.part, unit.chapter, document);
  return keys;
}

void write_parts(const fs::path& folder, const std::map<std::string, json>& parts) {
  std::vector<EvidenceLine> lines;
  for (const auto& [name, part] : parts) lines.push_back(make_line(name, part));
  write_lines(folder / kParts, lines);
}

json digests(const fs::path& folder, const Unit& unit, const std::vector<std::string>& logs) {
  json files = json::object();
  for (const std::string& container : containers(folder))
    if (is_of(container, unit)) files[container] = digest(folder / container);
  for (const std::string& log : logs) files[log] = digest(folder / log);
  return files;
}

// Sorts the lines of a container: problems in listed order, steps in ladder order.
void sort_lines(std::vector<EvidenceLine>& lines, const std::string& part,
                const std::vector<ListedProblem>& listed) {
  if (part == kOthers) return;
  std::map<std::string, std::size_t> place;
  for (const ListedProblem& p : listed)
    if (p.part == part) place.emplace(part == "peers" ? p.options : p.name, place.size());
  const auto key = [&](const EvidenceLine& line) {
    std::string name = listed_name(part, line.name);
    if (part == "counters") return std::tuple(std::size_t{0}, std::string(), partial_index(name));
    const json j = line.json();
    if (part == "peers") name = j.value("options", kUnknown);
    const auto found = place.find(name);
    return std::tuple(found == place.end() ? listed.size() : found->second,
                      part == "peers" ? std::string() : name,
                      part == "peers" ? std::pair(std::size_t{0}, 0)
                                      : partial_index(j.at("steps").at(0).at("name")));
  };
  std::vector<std::pair<decltype(key(lines[0])), EvidenceLine>> keyed;
  for (EvidenceLine& line : lines) keyed.emplace_back(key(line), std::move(line));
  std::ranges::stable_sort(keyed, {}, [](const auto& k) { return k.first; });
  lines.clear();
  for (auto& [k, line] : keyed) lines.push_back(std::move(line));
}

// Whether no listed problem of a line's part has its document and its options.
bool is_delisted(const EvidenceLine& line, const Unit& unit,
                 const std::vector<ListedProblem>& listed) {
  const std::string options = line.json().value("options", kUnknown);
  return std::ranges::none_of(listed, [&](const ListedProblem& p) {
    return p.part == unit.part && p.name == listed_name(unit.part, line.name) &&
           (unit.part != "peers" || options == kUnknown || options == p.options);
  });
}

// Replaces the lines for which `replaced` holds by `fresh`.
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

// The rows of ncu with the step in front, and the lines above them.
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

// False for files that describe measurements.
bool is_evidence(const std::string& name) {
  return name != kParts && name != "README.md" && !name.ends_with(".new");
}

}  // namespace

void record(const fs::path& folder, CodeKeys& code, const Unit& unit, const std::string& name,
            const fs::path& file, const std::vector<std::string>& options, const json& measured) {
  std::vector<EvidenceLine> lines;
  std::set<std::string> fresh;  // steps, or options, of the new lines
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
      line["keys"] = keys_of(code, unit, steps_in(unit.part, unit.chapter, element, code), name);
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
  // While the part is running, its files are marked as incomplete.
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
          return (unit.part == "times" && code.kernel(unit.chapter, step_of(line.json())) == "-") ||
                 is_delisted(line, unit, listed);
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

// Throws InputError if a line, a file or a checksum of the folder was edited.
void require_unedited(const fs::path& folder) {
  for (const std::string& wrong : edited_evidence(folder))
    if (wrong.ends_with("was edited") || wrong.ends_with("measured") || wrong.ends_with("a file"))
      throw InputError(fmt::format("{}: {}; nothing was merged", folder.string(), wrong));
}

void merge(const fs::path& folder, CodeKeys& code, const fs::path& from) {
  if (fs::equivalent(folder, from))
    throw InputError(fmt::format("{}: cannot be merged into itself", folder.string()));
  require_unedited(folder);
  require_unedited(from);
  const std::map<std::string, json> measured = read_parts(from);
  std::map<std::string, json> parts = read_parts(folder);
  for (const std::string& name : containers(from)) {
    const Unit unit{part_of(name), chapter_of(name)};
    // a problem and, except for peers, a step
    const auto identity = [&](const EvidenceLine& line) {
      const json j = line.json();
      return line.name + " " +
             (unit.part == "times"   ? step_of(j)
              : unit.part == "peers" ? j.value("options", kUnknown)
                                     : "");
    };
    const auto current = [&](const EvidenceLine& line) {
      const json keys = line.json().value("keys", json::object());
      const json kernels = keys.value("kernel", json::object()),
                 launches = keys.value("launch", json::object());
      if (keys.value("method", "") != code.method(unit.part, unit.chapter, line.name))
        return false;
      for (const auto& [step, key] : kernels.items())
        if (key != code.kernel(unit.chapter, step)) return false;
      for (const auto& [step, key] : launches.items())
        if (key != code.launch(unit.chapter, step)) return false;
      return true;
    };
    std::map<std::string, bool> here;
    for (const EvidenceLine& line : read_lines(folder / name)) here[identity(line)] = current(line);
    // Peers' lines without options: one is replaced by a line of the same problem.
    const auto problem_of = [](const EvidenceLine& line) -> std::string {
      const json problems = line.json().value("problems", json());
      if (!problems.is_array() || problems.empty()) return "";
      return line.name + problems[0].value("problem", json()).dump();
    };
    std::vector<EvidenceLine> fresh;
    std::set<std::string> replaced, problems;
    for (const EvidenceLine& line : read_lines(from / name)) {
      const std::string id = identity(line);
      // Lines that `folder` has replaced since `from` was copied from it do not come back.
      const auto newer = here.lower_bound(line.name + " ");
      if (id == line.name + " " + kUnknown && !here.contains(id) && newer != here.end() &&
          newer->first.starts_with(line.name + " "))
        continue;
      if (const auto old = here.find(id); old != here.end() && old->second && !current(line))
        continue;
      fresh.push_back(line);
      replaced.insert(id);
      if (id != line.name + " " + kUnknown) problems.insert(problem_of(line));
      // As in record(): peers of problems that were not recorded make way, if the part is complete.
      if (unit.part == "peers" && measured.at(name_of(unit)).at("verdict") == "passed")
        replaced.insert(line.name + " " + kUnknown);
    }
    // As in finish(): a part that passed has no lines of peers that are listed no more.
    const auto& listed = code.problems(unit.chapter);
    const bool complete = unit.part == "peers" && !listed.empty() &&
                          measured.at(name_of(unit)).at("verdict") == "passed";
    replace_lines(folder / name, std::move(fresh), unit.part, listed,
                  [&](const EvidenceLine& line) {
                    const std::string id = identity(line);
                    return replaced.contains(id) || (complete && is_delisted(line, unit, listed)) ||
                           (unit.part == "peers" && id == line.name + " " + kUnknown &&
                            problems.contains(problem_of(line)));
                  });
  }
  // `from` may be a copy of `folder` from before: a part that was measured again since then stays.
  const auto date = [](const json& part) {
    const std::string text = part.value("measured", json::object()).value("date", kUnknown);
    return text == kUnknown ? "" : text;
  };
  for (const auto& [name, part] : measured) {
    const bool older = parts.contains(name) && date(part) < date(parts[name]);
    const bool taken = !older && (part.at("verdict") == "passed" || !parts.contains(name));
    if (taken)
      parts[name] = part;
    else if (!older)
      parts[name]["merged"] = {{"verdict", part.at("verdict")},
                               {"measured", part.value("measured", json::object())}};
    std::vector<std::string> logs;
    for (const auto& [file, sum] : parts[name].at("files").items())
      if (!file.ends_with(".jsonl") && !file.ends_with(".counters.csv")) logs.push_back(file);
    if (taken)
      for (const std::string& log : logs)
        fs::copy_file(from / log, folder / log, fs::copy_options::overwrite_existing);
    parts[name]["files"] = digests(folder, unit_of(name), logs);
  }
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
      else if (digest(folder / name) != sum.get<std::string>())
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

}  // namespace attn::report
