#include "report/tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "report/containers.h"
#include "report/evidence.h"
#include "report/table_kinds.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

namespace fs = std::filesystem;

// Expands names that end in * to all files with that prefix, shorter names first: n1024 comes
// before n16384.
Words expand(const fs::path& folder, const Words& words) {
  Words all;
  for (const std::string& word : words) {
    if (!word.ends_with('*')) {
      all.push_back(word);
      continue;
    }
    Words found = document_names(folder, word.substr(0, word.size() - 1), ".json");
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
  if (kind == "chapters") return chapters_table(reports, names);
  if (kind == "compare") return compare_table(reports, names);
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
  throw InputError(fmt::format(
      "table: {}: must be steps, ladder, tree, phases, lengths, problems, accuracy, "
      "memory, chapters, compare, peers, ratios, means, others, headline, counters, traffic, "
      "diff or state",
      kind));
}

// The documents of a table, by name. Their state is reported below it.
Words documents_of(const Words& words, const fs::path& reports) {
  const std::string& kind = words.at(0);
  Words names(words.begin() + 1, words.end()), documents;
  const auto counters = [&](const std::string& chapter) {
    return document_names(reports, chapter + ".", ".ncu.csv");
  };
  if (kind == "state") return {};
  if (kind == "counters") return counters(names.at(0));
  if (kind == "diff") return {names.at(0), names.at(1)};
  if (kind == "traffic") {
    std::istringstream steps(names.at(2));
    for (std::string step; std::getline(steps, step, ',');)
      documents.push_back(names.at(1) + "." + step);
    names.resize(1);
  }
  if (kind == "headline") names = headline_files(names);
  if (kind == "chapters") names = chapter_files(names);
  if (kind == "compare") names = compared_files(names);
  std::erase_if(names, [](const std::string& n) { return n.find('=') != n.npos; });
  if (kind == "ladder") documents = counters(names.at(0).substr(0, names.at(0).find('.')));
  for (const std::string& name : expand(reports, names)) documents.push_back(name);
  return documents;
}

// The state of these documents, a paragraph per folder ("../h100/NAME").
std::string states_of(const fs::path& reports, const Words& documents, const std::string& table) {
  std::map<fs::path, Words> by_folder;
  if (documents.empty()) by_folder[""];
  for (const std::string& name : documents)
    by_folder[fs::path(name).parent_path()].push_back(fs::path(name).filename().string());
  std::string text;
  for (const auto& [folder, names] : by_folder) {
    const std::string state = state_of((reports / folder).lexically_normal(), names, table);
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
  // Otherwise every table of a page would be reported as not measured.
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
      if (words[0] != "tree" && words[0] != "state")
        out += states_of(reports, documents_of(words, reports), body);
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
