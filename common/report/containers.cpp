#include "report/containers.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <string_view>

#include "attn/error.h"
#include "report/sha256.h"

namespace attn::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kLines = ".jsonl", kCounters = ".counters.csv", kJson = ".json",
                           kExport = ".ncu.csv";
// The first and last field of a line, and the prefix of the line above a step's rows.
constexpr std::string_view kName = "{\"name\":\"", kSum = ",\"sum\":\"", kStep = "# ";
constexpr std::size_t kSumLength = 16;

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::string bytes(file ? static_cast<std::size_t>(file.tellg()) : 0, '\0');
  file.seekg(0).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

std::string sum_of(const std::string& text, const std::string& rows) {
  return sha256(text + "\n" + rows).substr(0, kSumLength);
}

// "NAME" for "NAME.json" or "NAME.ncu.csv"; empty for other names.
std::string without(const std::string& name, std::string_view suffix) {
  return name.size() > suffix.size() && name.ends_with(suffix)
             ? name.substr(0, name.size() - suffix.size())
             : "";
}

struct File {
  std::string bytes, header;  // for counters: the column names
  std::vector<EvidenceLine> lines;
};

// Reads a file again if it has changed: tests and verify_on_gpu.sh write to them.
const File& file_of(const fs::path& path) {
  static std::map<fs::path, File> known;
  File& file = known[path];
  std::string bytes = read(path);
  if (bytes == file.bytes) return file;
  file = {std::move(bytes), "", {}};
  const bool counters = path.string().ends_with(kCounters);
  std::size_t number = 0;
  for (std::size_t at = 0; at < file.bytes.size();) {
    const std::size_t end = std::min(file.bytes.find('\n', at), file.bytes.size());
    std::string text = file.bytes.substr(at, end - at);
    at = end + 1;
    ++number;
    if (text.empty()) continue;
    if (counters && file.header.empty()) {
      if (!text.starts_with("\"Step\"")) {
        file.bytes.clear();
        throw InputError(fmt::format("{}: its first line must name the columns", path.string()));
      }
      file.header = text;
      continue;
    }
    if (counters && !text.starts_with(kStep) && !file.lines.empty()) {
      file.lines.back().rows += text + "\n";
      continue;
    }
    if (counters) text.erase(0, std::min(kStep.size(), text.size()));
    const std::size_t name_end = text.find('"', kName.size());
    if (!text.starts_with(kName) || name_end == text.npos) {
      file.bytes.clear();
      throw InputError(fmt::format("{}:{}: is not a line of evidence", path.string(), number));
    }
    file.lines.push_back({text.substr(kName.size(), name_end - kName.size()), text, ""});
  }
  return file;
}

// The document of several lines: that of the first, with the elements of all.
json joined(const std::vector<const EvidenceLine*>& lines) {
  json document = lines[0]->json();
  for (const char* own : {"name", "options", "keys", "measured", "sum"}) document.erase(own);
  json& elements = document[array_of(document)];
  for (std::size_t n = 1; n < lines.size(); ++n) {
    const json line = lines[n]->json();
    elements.push_back(line.at(array_of(line)).at(0));
  }
  return document;
}

// An export as ncu_export.sh writes it: the lines of profile.sh, and rows without the step.
std::string export_of(const File& file, const EvidenceLine& line) {
  const auto after_comma = [](const std::string& text) { return text.substr(text.find(',') + 1); };
  const json j = line.json();
  std::string text;
  for (const char* what : {"clocks", "problem"})
    if (const auto said = j.value(what, ""); !said.empty())
      text += fmt::format("==profile.sh== {}: {}\n", what, said);
  text += after_comma(file.header) + "\n";
  for (std::size_t at = 0; at < line.rows.size();) {
    const std::size_t end = line.rows.find('\n', at);
    text += after_comma(line.rows.substr(at, end - at)) + "\n";
    at = end + 1;
  }
  return text;
}

}  // namespace

json EvidenceLine::json() const {
  nlohmann::json j = nlohmann::json::parse(text, nullptr, false);
  if (j.is_discarded()) throw InputError(fmt::format("{}: its line is not JSON", name));
  return j;
}

bool EvidenceLine::intact() const {
  const std::size_t at = text.rfind(kSum);
  return at != text.npos && text.size() == at + kSum.size() + kSumLength + 2 &&
         text.substr(at + kSum.size(), kSumLength) == sum_of(text.substr(0, at), rows);
}

EvidenceLine make_line(const std::string& name, const json& line, const std::string& rows) {
  json rest = line;
  rest.erase("name");
  rest.erase("sum");
  EvidenceLine made{name, fmt::format("{}{}\",{}", kName, name, rest.dump().substr(1)), rows};
  made.text.pop_back();
  made.text += fmt::format("{}{}\"}}", kSum, sum_of(made.text, rows));
  return made;
}

const std::vector<EvidenceLine>& read_lines(const fs::path& path) { return file_of(path).lines; }

void write_lines(const fs::path& path, const std::vector<EvidenceLine>& lines) {
  const fs::path part = path.string() + ".new";
  {
    std::ofstream file(part, std::ios::binary);
    if (path.string().ends_with(kCounters)) {
      file << "\"Step\"";
      for (const char* column : {"ID", "Process ID", "Process Name", "Host Name", "Kernel Name",
                                 "Context", "Stream", "Block Size", "Grid Size", "Device", "CC",
                                 "Section Name", "Metric Name", "Metric Unit", "Metric Value"})
        file << ",\"" << column << '"';
      file << '\n';
      for (const EvidenceLine& line : lines) file << kStep << line.text << '\n' << line.rows;
    } else {
      for (const EvidenceLine& line : lines) file << line.text << '\n';
    }
    if (!file.flush()) throw InputError(fmt::format("{}: cannot be written", path.string()));
  }
  fs::rename(part, path);
}

std::vector<std::string> containers(const fs::path& folder) {
  std::vector<std::string> names;
  if (!fs::is_directory(folder)) return names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name != "parts.jsonl" && (name.ends_with(kLines) || name.ends_with(kCounters)))
      names.push_back(name);
  }
  std::ranges::sort(names);
  return names;
}

std::string array_of(const json& document) {
  for (const char* name : {"steps", "rows", "problems"})
    if (document.contains(name) && document.at(name).is_array()) return name;
  throw InputError("a document without steps, rows or problems");
}

namespace {

// The lines that form the document of a path, and their file; empty if there is no such document.
std::pair<const File*, std::vector<const EvidenceLine*>> document_lines(const fs::path& path) {
  const std::string file = path.filename().string();
  const std::string counted = without(file, kExport), result = without(file, kJson);
  for (const std::string& container : containers(path.parent_path())) {
    const bool counters = container.ends_with(kCounters);
    const std::string& wanted = counters ? counted : result;
    if (wanted.empty() || !container.starts_with(wanted.substr(0, wanted.find('.') + 1))) continue;
    const File& all = file_of(path.parent_path() / container);
    std::vector<const EvidenceLine*> lines;
    for (const EvidenceLine& line : all.lines)
      if (line.name == wanted) lines.push_back(&line);
    if (!lines.empty()) return {&all, lines};
  }
  return {};
}

}  // namespace

bool is_contained(const fs::path& path) { return !document_lines(path).second.empty(); }

std::string contained_document(const fs::path& path) {
  const auto [file, lines] = document_lines(path);
  if (lines.empty()) return "";
  return file->header.empty() ? joined(lines).dump() : export_of(*file, *lines[0]);
}

std::vector<std::string> document_names(const fs::path& folder, const std::string& begin,
                                        const std::string& suffix) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    if (const std::string name = without(entry.path().filename().string(), suffix); !name.empty())
      names.insert(name);
  for (const std::string& container : containers(folder))
    if (container.ends_with(kCounters) == (suffix == kExport))
      for (const EvidenceLine& line : read_lines(folder / container)) names.insert(line.name);
  std::erase_if(names, [&](const std::string& name) { return !name.starts_with(begin); });
  return {names.begin(), names.end()};
}

fs::path named_document(const fs::path& path, const std::string& step) {
  if (const std::string chapter = without(path.filename().string(), kCounters); !chapter.empty()) {
    if (step.empty())
      throw InputError(
          fmt::format("{}: has the counters of several steps: name one with --step, "
                      "or with --step-a and --step-b",
                      path.string()));
    return path.parent_path() / fmt::format("{}.{}{}", chapter, step, kExport);
  }
  if (fs::exists(path)) return path;
  for (const std::string_view suffix : {kJson, kExport}) {
    const fs::path whole = path.string() + std::string(suffix);
    if (fs::exists(whole) || is_contained(whole)) return whole;
  }
  return path;
}

}  // namespace attn::report
