#include "report/evidence_lines.h"

#include <sstream>

namespace attn::report {

namespace fs = std::filesystem;
using nlohmann::json;

std::string name_of(const Unit& unit) { return unit.part + " " + unit.chapter; }

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

std::string listed_name(const std::string& part, const std::string& document) {
  return part == "peers" ? document : document.substr(document.find('.') + 1);
}

Unit unit_of(const std::string& name) {
  return {name.substr(0, name.find(' ')), name.substr(name.find(' ') + 1)};
}

std::string step_of(const json& line) { return line.at("steps").at(0).at("name"); }

std::map<std::string, bool> steps_of_log(CodeKeys& code, const Unit& unit) {
  if (unit.part == "access") return {{"warp_access", true}};
  if (unit.part == "calls") return {};
  std::map<std::string, bool> steps;
  for (const std::string& step : code.steps(unit.chapter)) steps[step] = true;
  return steps;
}

std::map<std::string, json> read_parts(const fs::path& folder) {
  std::map<std::string, json> parts;
  for (const EvidenceLine& line : read_lines(folder / kParts)) parts[line.name] = line.json();
  return parts;
}

void for_each_line(const fs::path& folder,
                   const std::function<void(const Unit&, const std::string&, const json&)>& take,
                   const Unit* only) {
  for (const std::string& container : containers(folder))
    if (only == nullptr || is_of(container, *only))
      for (const EvidenceLine& line : read_lines(folder / container))
        take(Unit{part_of(container), chapter_of(container)}, line.name, line.json());
  for (const auto& [name, part] : read_parts(folder))
    if (part.contains("keys") && (only == nullptr || name == name_of(*only)))
      take(unit_of(name), std::string(), part);
}

}  // namespace attn::report
