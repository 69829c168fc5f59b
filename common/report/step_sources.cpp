#include "report/step_sources.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <regex>

namespace attn::report {
namespace {

namespace fs = std::filesystem;

// The fields of the comment at the top of a step file, by keyword: "parent", "expect".
std::map<std::string, std::string> header_of(const fs::path& path) {
  static const std::regex kParagraph("// ([a-z]+)  +(.*)"), kMore("//  +(.*)");
  std::map<std::string, std::string> header;
  std::ifstream file(path);
  std::string key;
  std::smatch match;
  for (std::string line; std::getline(file, line) && line.starts_with("//");)
    if (std::regex_match(line, match, kParagraph))
      header[key = match[1]] = match[2];
    else if (!key.empty() && std::regex_match(line, match, kMore))
      header[key] += " " + match[1].str();
    else
      key.clear();
  return header;
}

bool word_character(char c) { return c == '_' || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); }

// Whether `text` contains `word` as a whole word.
bool has_word(const std::string& text, std::string_view word) {
  for (std::size_t at = 0; (at = text.find(word, at)) != text.npos; ++at) {
    const std::size_t end = at + word.size();
    if ((at == 0 || !word_character(text[at - 1])) &&
        (end == text.size() || !word_character(text[end])))
      return true;
  }
  return false;
}

}  // namespace

std::pair<std::size_t, int> partial_index(const std::string& step) {
  constexpr std::string_view kFamilies = "vqfbdsac";
  return {kFamilies.find(step[0]), std::atoi(step.c_str() + 1)};
}

std::vector<StepSource> read_step_sources(const fs::path& chapter) {
  static const std::regex kStep("[a-z][0-9]+_[a-z0-9_]+");
  static const std::regex kElsewhere("chapter|[0-9]{2}_[a-z0-9_]+/$");
  std::vector<StepSource> steps;
  if (!fs::is_directory(chapter)) return steps;
  for (const auto& entry : fs::directory_iterator(chapter)) {
    const std::string name = entry.path().stem().string();
    if (entry.path().extension() != ".cu" || !std::regex_match(name, kStep)) continue;
    auto header = header_of(entry.path());
    StepSource s{name, "", "", header["expect"]};
    const std::string& said = header["parent"];
    if (std::smatch match; std::regex_search(said, match, kStep)) {
      const std::string parent = match[0], before = match.prefix();
      if (fs::exists(chapter / (parent + ".cu")) && !std::regex_search(before, kElsewhere))
        s.parent = parent;
      else
        s.from = said.substr(0, said.find_first_of(";(:"));
    } else if (said.starts_with("none")) {
      s.from = "none";
    }
    while (s.from.ends_with(' ')) s.from.pop_back();
    steps.push_back(s);
  }
  std::sort(steps.begin(), steps.end(), [](const StepSource& a, const StepSource& b) {
    return partial_index(a.name) != partial_index(b.name)
               ? partial_index(a.name) < partial_index(b.name)
               : a.name < b.name;
  });
  return steps;
}

std::vector<TreeRow> step_tree(const std::vector<StepSource>& steps,
                               const std::vector<std::string>& wanted) {
  std::map<std::string, const StepSource*> by_name;
  for (const StepSource& s : steps) by_name[s.name] = &s;
  const auto is_wanted = [&](const std::string& name) {
    return wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end();
  };
  // The key "" holds the roots. Bounding the depth by the number of steps keeps a cycle among
  // headers from losing steps.
  std::map<std::string, std::vector<const StepSource*>> children;
  for (const StepSource& s : steps) {
    if (!is_wanted(s.name)) continue;
    std::string parent = s.parent;
    for (std::size_t n = 0; n < steps.size() && !parent.empty() && !is_wanted(parent); ++n)
      parent = by_name.contains(parent) ? by_name[parent]->parent : "";
    children[parent].push_back(&s);
  }
  std::function<int(const StepSource*)> descendants = [&](const StepSource* s) {
    int count = 0;
    for (const StepSource* child : children[s->name]) count += 1 + descendants(child);
    return count;
  };
  std::vector<TreeRow> rows;
  std::function<void(const StepSource*, int)> add = [&](const StepSource* s, int depth) {
    rows.push_back({s, depth});
    const auto& all = children[s->name];
    const StepSource* trunk = nullptr;
    for (const StepSource* child : all)
      if (child->name[0] == s->name[0] && (!trunk || descendants(child) >= descendants(trunk)))
        trunk = child;
    for (const StepSource* child : all)
      if (child != trunk) add(child, depth + 1);
    if (trunk) add(trunk, depth);
  };
  for (const StepSource* root : children[""]) add(root, 0);
  return rows;
}

bool expects(const StepSource& s, const Counter& c) {
  for (const NcuName& n : ncu_names(c.key)) {
    // "dram__bytes_read.sum" in full, or without its ending: "..._stalled_long_scoreboard..."
    std::string base(n.name.substr(0, n.name.find('.')));
    if (has_word(s.expect, base)) return true;
    if (const auto per = base.find("_per_issue_active"); per != base.npos)
      if (has_word(s.expect, base.substr(0, per))) return true;
  }
  std::string text = s.expect, label(c.label);
  for (std::string* t : {&text, &label})
    std::transform(t->begin(), t->end(), t->begin(), [](char x) {
      return x == '_' ? ' ' : x >= 'A' && x <= 'Z' ? static_cast<char>(x + 32) : x;
    });
  if (!label.starts_with("stall ")) return has_word(text, label);
  // "stalls on barriers", "long scoreboard stalls"
  const std::string reason = label.substr(6);
  return text.find("stall") != text.npos &&
         (has_word(text, reason) || has_word(text, reason + "s"));
}

}  // namespace attn::report
