#include "report/evidence.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "device/device.h"  // kTimingMethod
#include "report/sha256.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kHead =
    "# What was measured on which kernels. Written by common/scripts/verify_on_gpu.sh; read by "
    "attn_report evidence.\n"
    "# A file: sha256, name, part, chapter, method of timing (0: no time of ours in it); below it "
    "the keys of its steps.\n";
// The part of what others measured, on our kernels too: it has no verdict of ours, and no line in
// parts.txt.
constexpr const char* kOthers = "others";
constexpr const char* kUnverified =
    "\n# Changed since, and not measured again: chapter/step, then the reason why this may "
    "be.\nunverified:\n";

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InputError(fmt::format("{}: cannot be read", path.string()));
  return {std::istreambuf_iterator<char>(file), {}};
}
void write(const fs::path& path, const std::string& text) {
  const fs::path part = path.string() + ".new";
  std::ofstream(part, std::ios::binary) << text;
  fs::rename(part, path);
}

// A line of parts.txt: "times 03_flash_v1  passed  files 0123456789abcdef  95 s".
struct Part {
  std::string verdict, digest;
  int seconds = 0;
};
std::map<std::string, Part> read_parts(const fs::path& folder) {
  std::map<std::string, Part> parts;
  if (!fs::exists(folder / "parts.txt")) return parts;
  std::istringstream lines(read(folder / "parts.txt"));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string part, chapter, verdict, of, digest;
    int seconds = 0;
    if (!(words >> part >> chapter >> verdict >> of >> digest >> seconds))
      throw InputError(
          fmt::format("{}: cannot be read: {}", (folder / "parts.txt").string(), line));
    parts[part + " " + chapter] = {verdict, digest, seconds};
  }
  return parts;
}

std::string text_of(const std::string& name, const EvidenceFile& f) {
  std::string text =
      fmt::format("{}  {}  {}  {}  {}\n", f.sha256, name, f.part, f.chapter, f.timing_method);
  for (const auto& [step, key] : f.keys) text += fmt::format("  {} {}\n", key, step);
  return text;
}

// Over all that the manifest says of a part's files.
std::string digest_of(const Manifest& m, const std::string& unit) {
  std::string text;
  for (const auto& [name, f] : m.files)
    if (f.part + " " + f.chapter == unit) text += text_of(name, f);
  return sha256(text).substr(0, 16);
}

// The steps that were launched for a file, and the method of their times.
void read_steps(const fs::path& path, const Keys& keys, EvidenceFile& f) {
  const std::string name = path.filename().string();
  std::set<std::string> steps;
  const auto results = [&](const json& run) {
    for (const json& s : run.at("steps"))
      if (s.at("outcome") != "unsupported" && s.at("outcome") != "error" &&
          (!s.at("time").is_null() || s.at("outcome") == "pass")) {
        steps.insert(s.at("name").get<std::string>());
        if (!s.at("time").is_null()) f.timing_method = run.value("timing_method", 1);
      }
  };
  if (f.part == kOthers) {
    const json j = read_json(path);
    for (const json& row : j.at("rows"))
      for (const auto& [step, time] : row.at("us").items())
        if (keys.contains(f.chapter + "/" + step)) steps.insert(step);
  } else if (name.ends_with(".json")) {
    const json j = read_json(path);
    if (!j.contains("problems")) {
      results(j);
    } else {
      for (const json& p : j.at("problems"))
        for (const json& run : p.at("runs")) results(run);
      f.timing_method = j.value("timing_method", 1);
    }
  } else if (name.ends_with(".ncu.csv")) {
    const std::size_t from = f.chapter.size() + 1;
    steps.insert(name.substr(from, name.size() - from - std::string(".ncu.csv").size()));
  } else {  // a log of all of the chapter's steps
    for (const auto& [step, key] : keys)
      if (step.starts_with(f.chapter + "/")) steps.insert(step.substr(f.chapter.size() + 1));
  }
  for (const std::string& step : steps) f.keys[step] = key_of(keys, f.chapter, step);
}

// Of a file, the steps whose kernels are not what they were.
std::vector<std::string> changed_steps(const EvidenceFile& f, const Keys& now) {
  std::vector<std::string> changed;
  for (const auto& [step, key] : f.keys)
    if (key_of(now, f.chapter, step) != key) changed.push_back(step);
  return changed;
}

// Not measurements: what describes them, and what was noted of versions that are no more.
bool is_evidence(const std::string& name) {
  return name != "manifest.txt" && name != "parts.txt" && name != "README.md" &&
         !name.ends_with(".new");
}

fs::path root_of(const fs::path& folder) {
  return fs::weakly_canonical(fs::absolute(folder) / "../../..");
}

// Of the project that a folder lies in, once: they take a quarter of a second, and a page has many
// tables.
const Keys& keys_around(const fs::path& folder) {
  static std::map<fs::path, Keys> known;
  const fs::path root = root_of(folder);
  const auto found = known.find(root);
  return found != known.end() ? found->second : known[root] = kernel_keys(root);
}

}  // namespace

Manifest read_manifest(const fs::path& folder) {
  const fs::path path = folder / "manifest.txt";
  Manifest m;
  std::istringstream lines(read(path));
  EvidenceFile* file = nullptr;
  bool unverified = false;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    const auto fail = [&] {
      throw InputError(fmt::format("{}:{}: cannot be read: {}", path.string(), number, line));
    };
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    if (line.starts_with("key version ")) {
      if (line != fmt::format("key version {}", kKeyVersion))
        throw InputError(fmt::format("{}: {}, this attn_report makes {}: build it anew",
                                     path.string(), line, kKeyVersion));
    } else if (line == "unverified:") {
      unverified = true;
    } else if (unverified) {
      std::string step, reason;
      words >> step;
      std::getline(words >> std::ws, reason);
      if (!m.unverified.emplace(step, reason).second) fail();
    } else if (line[0] == ' ') {
      std::string key, step;
      if (!file || !(words >> key >> step) || !file->keys.emplace(step, key).second) fail();
    } else {
      EvidenceFile f;
      std::string name;
      if (!(words >> f.sha256 >> name >> f.part >> f.chapter >> f.timing_method) ||
          f.sha256.size() != 64)
        fail();
      const auto [entry, fresh] = m.files.emplace(name, f);
      if (!fresh) fail();
      file = &entry->second;
    }
  }
  return m;
}

void write_manifest(const fs::path& folder, const Manifest& m) {
  std::string text = kHead + fmt::format("key version {}\n", kKeyVersion);
  for (const auto& [name, f] : m.files) text += text_of(name, f);
  text += kUnverified;
  for (const auto& [step, reason] : m.unverified) text += fmt::format("{}  {}\n", step, reason);
  write(folder / "manifest.txt", text);
}

void record(const fs::path& folder, const fs::path& root, const std::string& part,
            const std::string& chapter, const std::string& verdict, int seconds,
            const std::vector<std::string>& files) {
  Manifest m;
  if (fs::exists(folder / "manifest.txt")) m = read_manifest(folder);
  const std::string unit = part + " " + chapter;
  std::erase_if(m.files, [&](const auto& entry) {
    return entry.second.part + " " + entry.second.chapter == unit &&
           !fs::exists(folder / entry.first);
  });
  const Keys keys = kernel_keys(root);
  for (const std::string& name : files) {
    EvidenceFile f{sha256(read(folder / name)), part, chapter, 0, {}};
    if (part != "tried") read_steps(folder / name, keys, f);
    m.files[name] = f;
  }
  // Reasons end where there are files of the step, all of the step as it is.
  std::erase_if(m.unverified, [&](const auto& entry) {
    bool measured = false, changed = false;
    for (const auto& [name, f] : m.files) {
      for (const auto& [step, key] : f.keys) measured |= f.chapter + "/" + step == entry.first;
      for (const std::string& step : changed_steps(f, keys))
        changed |= f.chapter + "/" + step == entry.first;
    }
    return measured && !changed;
  });
  write_manifest(folder, m);
  if (part == "tried" || part == kOthers) return;
  std::map<std::string, Part> parts = read_parts(folder);
  parts[unit] = {verdict, digest_of(m, unit), seconds};
  std::string text;
  for (const auto& [name, p] : parts)
    text += fmt::format("{}  {}  files {}  {} s\n", name, p.verdict, p.digest, p.seconds);
  write(folder / "parts.txt", text);
}

std::vector<std::string> check_evidence(const fs::path& folder, const fs::path& root) {
  const Manifest m = read_manifest(folder);
  const Keys now = kernel_keys(root);
  std::vector<std::string> wrong;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (is_evidence(name) && !m.files.contains(name))
      wrong.push_back(fmt::format("{}: the manifest has no such file", name));
  }
  std::set<std::string> units, changed;
  bool own = false;  // not what others measured alone
  for (const auto& [name, f] : m.files) {
    if (f.part != kOthers) units.insert(f.part + " " + f.chapter), own = true;
    if (!fs::exists(folder / name))
      wrong.push_back(fmt::format("{}: gone since it was measured", name));
    else if (sha256(read(folder / name)) != f.sha256)
      wrong.push_back(fmt::format("{}: not as it was measured", name));
    if (f.part == kOthers) continue;  // its tables say that kernels have changed since
    for (const std::string& step : changed_steps(f, now)) changed.insert(f.chapter + "/" + step);
  }
  const std::map<std::string, Part> parts = read_parts(folder);
  for (const auto& [unit, part] : parts) {
    if (part.verdict != "passed")
      wrong.push_back(fmt::format("parts.txt: {}: {}", unit, part.verdict));
    if (part.digest != digest_of(m, unit))
      wrong.push_back(
          fmt::format("parts.txt: {}: its files are not those that it passed with", unit));
  }
  for (const std::string& unit : units)
    if (!unit.starts_with("tried ") && !parts.contains(unit))
      wrong.push_back(fmt::format("parts.txt: {}: has files, and no line", unit));
  for (const auto& [step, key] : now)
    if (own && std::ranges::none_of(m.files, [&, &s = step](const auto& named) {
          const auto slash = s.find('/');
          return named.second.part != kOthers && named.second.chapter == s.substr(0, slash) &&
                 named.second.keys.contains(s.substr(slash + 1));
        }))
      changed.insert(step);  // new
  for (const std::string& step : changed) {
    const auto reason = m.unverified.find(step);
    if (reason == m.unverified.end())
      wrong.push_back(
          fmt::format("{}: changed since it was measured, and not listed as unverified", step));
    else if (reason->second.empty())
      wrong.push_back(fmt::format("{}: listed as unverified without a reason", step));
  }
  for (const auto& [step, reason] : m.unverified)
    if (!changed.contains(step))
      wrong.push_back(fmt::format("{}: listed as unverified, but as it was measured", step));
  return wrong;
}

std::string evidence_summary(const fs::path& folder, const fs::path& root) {
  const Manifest m = read_manifest(folder);
  const Keys now = kernel_keys(root);
  std::map<std::string, std::set<std::string>> changed, older;  // by chapter: steps, files
  std::set<std::string> steps;
  for (const auto& [name, f] : m.files) {
    for (const auto& [step, key] : f.keys) steps.insert(f.chapter + "/" + step);
    for (const std::string& step : changed_steps(f, now)) changed[f.chapter].insert(step);
    if (f.timing_method != 0 && f.timing_method != kTimingMethod) older[f.chapter].insert(f.part);
  }
  std::string text =
      fmt::format("{}: {} files of {} steps\n", folder.string(), m.files.size(), steps.size());
  for (const auto& [chapter, names] : changed)
    text += fmt::format("  {}: changed since: {}\n", chapter, fmt::join(names, ", "));
  for (const auto& [chapter, parts] : older)
    text += fmt::format("  {}: an earlier timing method: {}\n", chapter, fmt::join(parts, ", "));
  if (changed.empty() && older.empty())
    text +=
        "  all of the kernels as they are, timing method " + std::to_string(kTimingMethod) + "\n";
  return text;
}

std::string state_of(const fs::path& folder, const std::vector<std::string>& files, fs::path root,
                     const std::string& table) {
  if (!fs::exists(folder / "manifest.txt")) return "";
  const bool around = root.empty();
  if (around) root = root_of(folder);
  if (!fs::exists(root / "common/attn/kernel.h")) return "";
  const Manifest m = read_manifest(folder);
  const Keys now = around ? keys_around(folder) : kernel_keys(root);
  std::set<std::string> changed, measured;
  std::set<int> methods;
  for (const std::string& name : files) {
    const auto found = m.files.find(name);
    if (found == m.files.end()) return fmt::format("State: {} is in no manifest.", name);
    const EvidenceFile& f = found->second;
    for (const auto& [step, key] : f.keys) measured.insert(code(step));
    for (const std::string& step : changed_steps(f, now)) changed.insert(code(step));
    if (f.timing_method != 0) methods.insert(f.timing_method);
  }
  if (measured.empty()) return "State: computed; nothing was launched.";
  const auto named = [&](const std::string& step) { return table.find(step) != table.npos; };
  if (std::ranges::any_of(m.files, [&](const auto& file) {
        return std::ranges::any_of(file.second.keys,
                                   [&](const auto& key) { return named(code(key.first)); });
      }))
    for (auto* const steps : {&changed, &measured})
      std::erase_if(*steps, [&](const std::string& step) { return !named(step); });
  std::string text = "State: ";
  if (changed.empty())
    text += "measured on the kernels as they are";
  else if (changed.size() > 2 && changed == measured)
    text += "every step has changed since";
  else
    text += fmt::format("{} {} changed since", fmt::join(changed, ", "),
                        changed.size() == 1 ? "has" : "have");
  if (methods.empty()) return text + ".";
  text += fmt::format(", timing method{} {}", methods.size() == 1 ? "" : "s",
                      fmt::join(methods, " and "));
  if (methods.contains(1)) text += "; method 1 counts the host's time to launch";
  if (methods.contains(2)) text += "; method 2 has one more event before the kernel";
  return text + ".";
}

std::string state_table(const fs::path& folder, fs::path root) {
  if (!fs::exists(folder / "manifest.txt"))
    throw NotMeasured(fmt::format("{}: no manifest yet", folder.string()));
  const Manifest m = read_manifest(folder);
  const Keys now = root.empty() ? keys_around(folder) : kernel_keys(root);
  struct Row {
    std::size_t files = 0;
    std::set<std::string> changed;
    std::set<int> methods;
  };
  std::map<std::pair<std::string, std::string>, Row> rows;  // chapter, part
  for (const auto& [name, f] : m.files) {
    if (f.part == "tried") continue;
    Row& row = rows[{f.chapter, f.part}];
    ++row.files;
    for (const std::string& step : changed_steps(f, now)) row.changed.insert(code(step));
    if (f.timing_method != 0) row.methods.insert(f.timing_method);
  }
  Grid grid;
  for (const auto& [unit, row] : rows) {
    grid.add_row();
    grid.add("chapter", "chapter", unit.first);
    grid.add("part", "part", unit.second);
    grid.add("files", "files", std::to_string(row.files));
    grid.add("changed", "changed since",
             row.changed.empty() ? "nothing" : fmt::format("{}", fmt::join(row.changed, ", ")));
    grid.add("method", "method of timing",
             unit.second == kOthers ? "not by our scripts"
             : row.methods.empty()  ? "no times"
                                    : fmt::format("{}", fmt::join(row.methods, ", ")));
  }
  std::string text = grid.markdown();
  std::map<std::string, std::vector<std::string>> fresh;  // by chapter: steps that no file has
  for (const auto& [step, reason] : m.unverified) {
    const auto slash = step.find('/');
    const std::string chapter = step.substr(0, slash), name = step.substr(slash + 1);
    if (std::ranges::any_of(m.files, [&](const auto& file) {
          return file.second.chapter == chapter && file.second.keys.contains(name);
        }))
      text += fmt::format("\n{}: not measured again: {}.\n", code(step), reason);
    else
      fresh[chapter].push_back(code(name));
  }
  std::vector<std::string> chapters;
  for (const auto& [chapter, steps] : fresh)
    chapters.push_back(fmt::format("{}: {}", chapter, fmt::join(steps, ", ")));
  if (!chapters.empty())
    text += fmt::format("\nNot measured yet: {}.\n", fmt::join(chapters, "; "));
  return text;
}

std::vector<std::string> current_files(const fs::path& folder, const fs::path& root,
                                       const std::string& part, const std::string& chapter) {
  Manifest m;
  if (fs::exists(folder / "manifest.txt")) m = read_manifest(folder);
  const Keys now = kernel_keys(root);
  std::vector<std::string> current;
  std::set<std::string> measured;
  for (const auto& [name, f] : m.files) {
    if (f.chapter != chapter) continue;
    for (const auto& [step, key] : f.keys) measured.insert(step);
    if (f.part == part && fs::exists(folder / name) && sha256(read(folder / name)) == f.sha256 &&
        changed_steps(f, now).empty())
      current.push_back(name);
  }
  // A step that no file has belongs into any of them.
  for (const auto& [step, key] : now)
    if (step.starts_with(chapter + "/") && !measured.contains(step.substr(chapter.size() + 1)))
      return {};
  return current;
}

std::vector<std::string> stalest_first(const fs::path& folder, const fs::path& root,
                                       const std::vector<std::string>& units, bool all) {
  Manifest m;
  if (fs::exists(folder / "manifest.txt")) m = read_manifest(folder);
  const Keys now = kernel_keys(root);
  const std::map<std::string, Part> parts = read_parts(folder);
  const auto rank = [&](const std::string& unit) {
    const auto part = parts.find(unit);
    if (part == parts.end() || part->second.verdict != "passed") return 0;
    int worst = 3;
    std::set<std::string> measured;
    for (const auto& [name, f] : m.files) {
      if (f.part + " " + f.chapter != unit) continue;
      for (const auto& [step, key] : f.keys) measured.insert(step);
      if (!changed_steps(f, now).empty()) worst = std::min(worst, 1);
      if (f.timing_method != 0 && f.timing_method != kTimingMethod) worst = std::min(worst, 2);
    }
    return worst;
  };
  std::vector<std::pair<int, std::string>> ranked;
  for (const std::string& unit : units)
    if (const int r = rank(unit); all || r < 3) ranked.emplace_back(r, unit);
  std::ranges::stable_sort(ranked, {}, &std::pair<int, std::string>::first);
  std::vector<std::string> order;
  for (const auto& [r, unit] : ranked) order.push_back(unit);
  return order;
}

}  // namespace attn::report
