#include "report/tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "report/evidence.h"
#include "report/table_kinds.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

namespace fs = std::filesystem;

// Names that end in * stand for all files that begin so, the short names first: n1024 comes before
// n16384.
Words expand(const fs::path& folder, const Words& words) {
  Words all;
  for (const std::string& word : words) {
    if (!word.ends_with('*')) {
      all.push_back(word);
      continue;
    }
    const std::string begin = word.substr(0, word.size() - 1), suffix = ".json";
    Words found;
    for (const auto& entry : fs::directory_iterator(folder)) {
      const std::string file = entry.path().filename().string();
      if (file.starts_with(begin) && file.ends_with(suffix))
        found.push_back(file.substr(0, file.size() - suffix.size()));
    }
    if (found.empty())
      throw NotMeasured(fmt::format("{}: no {}.json there yet", folder.string(), word));
    std::sort(found.begin(), found.end(), [](const std::string& a, const std::string& b) {
      return a.size() != b.size() ? a.size() < b.size() : a < b;
    });
    all.insert(all.end(), found.begin(), found.end());
  }
  return all;
}

std::string table(const Words& words, const fs::path& reports, const fs::path& page) {
  const std::string& kind = words.at(0);
  if (kind == "state") return state_table(reports);
  const Words names(words.begin() + 1, words.end());
  const auto file = [&] { return reports / (names.at(0) + ".json"); };
  if (kind == "steps") return steps_table(file());
  if (kind == "ladder") return ladder_table(reports, names, page);
  if (kind == "tree") return tree_figure(names.at(0), page);
  if (kind == "phases") return phases_table(file());
  if (kind == "lengths") return lengths_table(reports, expand(reports, names));
  if (kind == "problems") return problems_table(reports, expand(reports, names));
  if (kind == "accuracy") return accuracy_table(reports, expand(reports, names));
  if (kind == "memory") return memory_table(reports, expand(reports, names));
  if (kind == "headline") return headline_table(reports, names);
  if (kind == "others") return others_table(reports, names);
  if (kind == "peers") return peers_table(file());
  if (kind == "means") return means_table(reports, names);
  if (kind == "ratios") return ratios_table(reports, names);
  if (kind == "counters") return counters_table(reports, names.at(0));
  if (kind == "traffic") return traffic_table(reports, names);
  if (kind == "diff") {
    if (names.size() < 2) throw InputError("table: diff: needs two exports");
    return diff_table(reports, names);
  }
  throw InputError(
      fmt::format("table: {}: must be steps, ladder, tree, phases, lengths, problems, accuracy, "
                  "memory, peers, ratios, means, others, headline, counters, traffic, diff or "
                  "state",
                  kind));
}

// Is it "chapter.STEP.ncu.csv" of one of these steps, "v1_a,v2_b"?
bool is_export_of(const std::string& name, const std::string& chapter, const std::string& steps) {
  constexpr std::string_view kEnd = ".ncu.csv";
  if (!name.starts_with(chapter + ".") || !name.ends_with(kEnd)) return false;
  const std::size_t from = chapter.size() + 1;
  const std::string step = name.substr(from, name.size() - from - kEnd.size());
  return fmt::format(",{},", steps).find(fmt::format(",{},", step)) != std::string::npos;
}

// The files that a table is made of, by name: whose state is told below it.
Words files_of(const Words& words, const fs::path& reports) {
  const std::string& kind = words.at(0);
  Words names(words.begin() + 1, words.end()), files;
  if (kind == "state") return {};
  if (kind == "counters" || kind == "diff" || kind == "traffic") {
    for (const auto& entry : fs::directory_iterator(reports)) {
      const std::string name = entry.path().filename().string();
      if (!name.ends_with(".ncu.csv")) continue;
      const bool wanted = kind == "counters"  ? name.starts_with(names.at(0) + ".")
                          : kind == "traffic" ? is_export_of(name, names.at(1), names.at(2))
                                              : name == names.at(0) + ".ncu.csv" ||
                                                    name == names.at(1) + ".ncu.csv";
      if (wanted) files.push_back(name);
    }
    if (kind != "traffic") return files;
    names.resize(1);
  }
  if (kind == "headline") names = headline_files(names);
  std::erase_if(names, [](const std::string& n) { return n.find('=') != n.npos; });
  if (kind == "ladder") {  // and the exports of the steps
    const std::string chapter = names.at(0).substr(0, names.at(0).find('.')) + ".";
    for (const auto& entry : fs::directory_iterator(reports)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with(chapter) && name.ends_with(".ncu.csv")) files.push_back(name);
    }
  }
  for (const std::string& name : expand(reports, names)) files.push_back(name + ".json");
  return files;
}

// The state of these files, a paragraph for each folder that they lie in ("../h100/NAME.json").
std::string states_of(const fs::path& reports, const Words& files, const std::string& table) {
  std::map<fs::path, Words> by_folder;
  if (files.empty()) by_folder[""];
  for (const std::string& file : files)
    by_folder[fs::path(file).parent_path()].push_back(fs::path(file).filename().string());
  std::string text;
  for (const auto& [folder, names] : by_folder) {
    const std::string state = state_of((reports / folder).lexically_normal(), names, {}, table);
    if (state.empty()) continue;
    text += "\n";
    if (!folder.empty()) text += folder.filename().string() + ": ";
    text += state + "\n";
  }
  return text;
}

}  // namespace

std::string fill_tables(const std::string& page, const std::string& name, const fs::path& reports,
                        std::vector<std::string>* missing) {
  static const std::string kBegin = "<!-- table: ", kClose = " -->", kEnd = "<!-- end table -->";
  // Else every table of a page would say that nobody measured it.
  if (!fs::is_directory(reports))
    throw InputError(fmt::format("{}: no such folder", reports.string()));
  std::string out;
  std::size_t at = 0;
  while (true) {
    const std::size_t begin = page.find(kBegin, at);
    if (begin == page.npos) break;
    const std::size_t close = page.find(kClose, begin), end = page.find(kEnd, begin);
    if (close == page.npos || end == page.npos || end < close)
      throw InputError(fmt::format("{}: a table marker without its {}", name, kEnd));
    std::istringstream text(page.substr(begin + kBegin.size(), close - begin - kBegin.size()));
    std::vector<std::string> words;
    for (std::string word; text >> word;) words.push_back(word);
    if (words.size() < 2)
      throw InputError(fmt::format("{}: a table marker needs a kind and a file", name));
    out += page.substr(at, close + kClose.size() - at) + "\n";
    try {
      const std::string body = table(words, reports, name);
      out += body;
      if (words[0] != "tree") out += states_of(reports, files_of(words, reports), body);
    } catch (const NotMeasured& e) {
      out += "not measured yet\n";
      if (missing)
        missing->push_back(fmt::format("{}: table {}: {}", name, fmt::join(words, " "), e.what()));
    } catch (const nlohmann::json::exception& e) {
      throw InputError(fmt::format("{}: table {}: {}", name, fmt::join(words, " "), e.what()));
    }
    at = end;
  }
  return out + page.substr(at);
}

}  // namespace attn::report
