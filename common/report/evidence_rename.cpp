// Renames steps in an evidence folder. The figures, keys and provenance of a line are kept; only
// names and the checksums that cover them change.
#include <fmt/format.h>

#include <algorithm>
#include <regex>
#include <set>
#include <sstream>

#include "report/containers.h"
#include "report/evidence.h"
#include "report/evidence_lines.h"
#include "report/json_object.h"
#include "report/sha256.h"
#include "report/step_sources.h"

namespace attn::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The renamed steps. All names change at once, so two steps may swap names.
class Names {
 public:
  Names(std::string chapter, const std::vector<Renamed>& names) : chapter_(std::move(chapter)) {
    std::set<std::string> targets;
    for (const auto& [from, to] : names) {
      if (!new_name_.emplace(from, to).second)
        throw InputError(fmt::format("{}: is renamed twice", from));
      if (!targets.insert(to).second)
        throw InputError(fmt::format("{}: two steps would get this name", to));
      static const std::regex kStep("[a-z][0-9]+_[a-z0-9_]+");
      if (!std::regex_match(to, kStep))
        throw InputError(fmt::format("{}: is not the name of a step, such as v14_name", to));
    }
  }

  const std::string& chapter() const { return chapter_; }
  // The new name of `step`, or its own.
  const std::string& of(const std::string& step) const {
    const auto found = new_name_.find(step);
    return found == new_name_.end() ? step : found->second;
  }
  // The same for a step of any chapter: "01_naive:v1_global", "01_naive.v1_global".
  std::string of_qualified(const std::string& name, char separator) const {
    const std::string own = chapter_ + separator;
    return name.starts_with(own) ? own + of(name.substr(own.size())) : name;
  }

  // Throws InputError unless every old name and no new name is one of the steps `used`.
  void check(const std::set<std::string>& used) const {
    for (const auto& [from, to] : new_name_) {
      if (!used.contains(from))
        throw InputError(fmt::format("{}: no line is of this step of {}", from, chapter_));
      if (used.contains(to) && !new_name_.contains(to))
        throw InputError(fmt::format("{}: {} has a step of this name already", to, chapter_));
    }
  }

 private:
  std::string chapter_;
  std::map<std::string, std::string> new_name_;
};

// The options of a program or of peers.py: lists of steps, and names such as 01_naive:v1_global.
std::string renamed_options(const std::string& options, const Names& names, bool own) {
  std::istringstream words(options);
  std::string text;
  bool steps = false;  // the last word was --step
  for (std::string word; words >> word;) {
    std::istringstream list(word);
    std::string all;
    for (std::string name; std::getline(list, name, ',');) {
      name = names.of_qualified(name, ':');
      all += (all.empty() ? "" : ",") + (own && steps ? names.of(name) : name);
    }
    steps = word == "--step" || word == "--steps";
    text += (text.empty() ? "" : " ") + all;
  }
  return text;
}

// `value` with the new names. `own`: it belongs to a step of the chapter, so unqualified names
// count.
json renamed(const json& value, const Names& names, bool own) {
  if (value.is_string()) {
    const auto text = value.get<std::string>();
    return names.of_qualified(own ? names.of(text) : text, ':');
  }
  if (value.is_array()) {
    json all = json::array();
    for (const json& element : value) all.push_back(renamed(element, names, own));
    return all;
  }
  if (!value.is_object()) return value;
  // The runs of peers.py may belong to several chapters.
  if (const auto chapter = value.find("chapter"); chapter != value.end() && chapter->is_string())
    own = *chapter == names.chapter();
  json all = json::object();
  for (const auto& [key, element] : value.items()) {
    const std::string name = names.of_qualified(own ? names.of(key) : key, ':');
    if (key == "measured")
      all[key] = element;
    else if (key == "options" && element.is_string())
      all[key] = renamed_options(element.get<std::string>(), names, own);
    else
      all[name] = renamed(element, names, own);
  }
  return all;
}

// The steps of the chapter that a line names: in its keys and in its elements.
void add_steps(const json& line, std::set<std::string>& steps) {
  for (const char* kind : {"kernel", "launch"})
    if (line.contains("keys") && line["keys"].contains(kind))
      for (const auto& [step, key] : line["keys"][kind].items()) steps.insert(step);
  if (line.contains("steps") && line["steps"].is_array())
    for (const json& s : line["steps"]) steps.insert(s.at("name").get<std::string>());
}

EvidenceLine renamed_line(const EvidenceLine& line, const Names& names, bool own) {
  const json before = line.json();
  const json after = renamed(before, names, own);
  const std::string name = names.of_qualified(line.name, '.');
  std::string rows;
  std::istringstream text(line.rows);
  for (std::string row; std::getline(text, row);) {  // the step is the first field of a row
    const std::size_t end = row.find('"', 1);
    rows += fmt::format("\"{}{}\n", names.of(row.substr(1, end - 1)), row.substr(end));
  }
  // Lines without any of the names are kept bytewise.
  return before == after && name == line.name && rows == line.rows ? line
                                                                   : make_line(name, after, rows);
}

// Sorts the lines of one document in ladder order; other lines keep their places.
void restore_order(std::vector<EvidenceLine>& lines, const std::string& part) {
  if (part != "times" && part != "counters") return;
  std::map<std::string, std::vector<std::size_t>> places;  // of a document
  for (std::size_t n = 0; n < lines.size(); ++n)
    places[part == "times" ? lines[n].name : ""].push_back(n);
  for (const auto& [document, own] : places) {
    std::vector<EvidenceLine> sorted;
    for (const std::size_t n : own) sorted.push_back(lines[n]);
    std::ranges::stable_sort(sorted, {}, [&](const EvidenceLine& line) {
      return partial_index(part == "times" ? step_of(line.json()) : listed_name(part, line.name));
    });
    for (std::size_t n = 0; n < own.size(); ++n) lines[own[n]] = sorted[n];
  }
}

bool same(const std::vector<EvidenceLine>& a, const std::vector<EvidenceLine>& b) {
  return std::ranges::equal(a, b, [](const EvidenceLine& x, const EvidenceLine& y) {
    return x.text == y.text && x.rows == y.rows;
  });
}

std::string digest(const fs::path& path) { return sha256(read_bytes(path)).substr(0, 16); }

}  // namespace

std::vector<std::string> rename_steps(const fs::path& folder, const std::string& chapter,
                                      const std::vector<Renamed>& renames) {
  const Names names(chapter, renames);
  // New checksums would hide edits of a line.
  for (const std::string& wrong : edited_evidence(folder))
    if (wrong.ends_with("was edited") || wrong.ends_with("not as it was measured"))
      throw InputError(fmt::format("{}: {}; nothing was renamed", folder.string(), wrong));
  std::set<std::string> used;
  for_each_line(folder, [&](const Unit& unit, const std::string& name, const json& line) {
    if (unit.chapter != chapter) return;
    add_steps(line, used);
    if (unit.part == "counters") used.insert(listed_name(unit.part, name));
  });
  names.check(used);

  std::map<std::string, std::vector<EvidenceLine>> changed;  // by file
  for (const std::string& container : containers(folder)) {
    const std::vector<EvidenceLine> before = read_lines(folder / container);
    std::vector<EvidenceLine> after;
    for (const EvidenceLine& line : before)
      after.push_back(renamed_line(line, names, chapter_of(container) == chapter));
    if (same(before, after)) continue;
    restore_order(after, part_of(container));
    changed[container] = std::move(after);
  }
  for (const auto& [container, lines] : changed) write_lines(folder / container, lines);

  std::vector<EvidenceLine> parts;
  for (const EvidenceLine& line : read_lines(folder / kParts)) {
    json part = line.json();
    if (unit_of(line.name).chapter == chapter && part.contains("keys"))
      part["keys"] = renamed(part["keys"], names, true);
    for (auto& [file, sum] : part.at("files").items())
      if (changed.contains(file)) sum = digest(folder / file);
    parts.push_back(part == line.json() ? line : make_line(line.name, part));
  }
  write_lines(folder / kParts, parts);
  std::vector<std::string> files;
  for (const auto& [container, lines] : changed) files.push_back(container);
  return files;
}

}  // namespace attn::report
