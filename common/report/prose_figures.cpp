#include "report/prose_figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>

#include "report/table_text.h"

namespace attn::report {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;
using Words = std::vector<std::string>;

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw InputError(fmt::format("{}: cannot be read", path.string()));
  return {std::istreambuf_iterator<char>(file), {}};
}
Words words_of(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}
std::string one_line(const std::string& text) {
  return fmt::format("{}", fmt::join(words_of(text), " "));
}

class Figures {
 public:
  Figures(const fs::path& root, fs::path reports) : reports_(std::move(reports)) {
    const std::regex chapter("([0-9][0-9])_.*");
    for (const auto& entry : fs::directory_iterator(root)) {
      const std::string name = entry.path().filename().string();
      if (std::smatch m; entry.is_directory() && std::regex_match(name, m, chapter))
        chapters_[m[1]] = name;
    }
  }

  // The figure of a field without its braces.
  std::string figure(const std::string& field) {
    Words words = words_of(field);
    if (words.size() < 3) throw InputError(fmt::format("{{{}}}: too few words", field));
    const Words name = split(words[0], '.');
    const std::string kind = name[0];
    const auto is = [&](std::initializer_list<const char*> kinds) {
      return std::ranges::find(kinds, kind) != kinds.end();
    };
    const auto word = [&](std::size_t n) { return n < words.size() ? words[n] : std::string(); };
    if (is({"faster", "less", "more", "saved", "pace"}) && words.size() < 5)
      throw InputError(fmt::format("{{{}}}: needs two steps", field));
    double value = 0;
    int decimals = is({"ms", "mean", "least", "most", "faster", "roof"}) ? 2 : 0;
    if (is({"ms", "us", "tflops", "gbs"})) {
      const Time t = time(words[1], words[2], word(3));
      value = kind == "ms"   ? t.seconds * 1e3
              : kind == "us" ? t.seconds * 1e6
                             : (kind == "gbs" ? t.bytes * 1e-9 : t.flop * 1e-12) / t.seconds;
    } else if (is({"faster", "less", "more", "saved"})) {
      const double a = time(words[1], words[2], word(5)).seconds,
                   b = time(words[3], words[4], word(5)).seconds;
      value = kind == "faster"  ? a / b
              : kind == "saved" ? (a - b) * 1e6
              : kind == "less"  ? 100 * (1 - b / a)
                                : 100 * (b / a - 1);
    } else if (kind == "pace") {
      const Time a = time(words[1], words[2], word(5)), b = time(words[3], words[4], word(5));
      value = 100 * (a.flop / a.seconds) / (b.flop / b.seconds);
    } else if (kind == "share") {
      const json& s = step(words[1], words[2]);
      value = 100 * (rated_by_use(s) ? s.at("useful_read_s").get<double>() /
                                           s.at("time").at("median_s").get<double>()
                                     : s.at("share_of_roof").get<double>());
    } else if (kind == "roof") {
      const json& roof = document(words[1]).at("roofs").value(words[2], json());
      if (roof.is_null()) throw InputError(fmt::format("{} has no roof {}", words[1], words[2]));
      value = roof.at("per_second").get<double>() * 1e-12;
    } else if (is({"mean", "least", "most", "points"})) {
      const std::ptrdiff_t named = std::min<std::ptrdiff_t>(4, std::ssize(words));
      const std::vector<double> r =
          ratios(words[1], words[2], word(3), {words.begin() + named, words.end()});
      double logs = 0;
      for (const double x : r) logs += std::log(x);
      value = kind == "least"  ? std::ranges::min(r)
              : kind == "most" ? std::ranges::max(r)
              : kind == "mean" ? std::exp(logs / static_cast<double>(r.size()))
                               : static_cast<double>(r.size());
    } else {
      throw InputError(fmt::format("{{{}}}: {} is no kind of figure", field, kind));
    }
    if (name.size() > 1) decimals = std::stoi(name[1]);
    return fmt::format("{:.{}f}", value, decimals);
  }

 private:
  struct Time {
    double seconds, flop, bytes;
  };

  const json& document(std::string name) {
    Words parts = split(name, '.');  // a later part may be one of 0.05
    std::string& first = parts[parts.size() > 1 && parts[0].ends_with("peers") ? 1 : 0];
    if (const auto chapter = chapters_.find(first); chapter != chapters_.end())
      first = chapter->second;
    name = fmt::format("{}", fmt::join(parts, "."));
    const auto [found, fresh] = documents_.try_emplace(name);
    if (fresh) found->second = read_json(reports_ / (name + ".json"));
    return found->second;
  }
  // "v13" is v13_even_splits.
  static bool is_step(const std::string& name, const std::string& wanted) {
    return name == wanted || name.starts_with(wanted + "_");
  }
  const json& step(const std::string& name, const std::string& wanted) {
    for (const json& s : document(name).at("steps"))
      if (is_step(s.at("name"), wanted) && !s.at("time").is_null()) return s;
    throw InputError(fmt::format("{} has no time of {}", name, wanted));
  }
  Time time(const std::string& name, const std::string& of, const std::string& phases) {
    const json& s = step(name, of);
    Time t{0, s.at("flop"), s.at("compulsory_bytes")};
    if (phases.empty()) t.seconds = s.at("time").at("median_s");
    for (const std::string& phase : split(phases, '+')) {
      const json& all = s.at("phases");
      const auto found = std::ranges::find_if(all, [&](const json& p) {
        return p.at("name") == phase;
      });
      if (found == all.end())
        throw InputError(fmt::format("{} has no time of {} {}", name, of, phase));
      t.seconds += found->at("time").at("median_s").get<double>();
    }
    return t;
  }
  std::vector<double> ratios(const std::string& name, const std::string& step, std::string peer,
                             const Words& problem_words) {
    if (peer.ends_with("_graph")) peer[peer.rfind('_')] = ' ';
    std::vector<double> found;
    for (const json& p : document(name).at("problems")) {
      const Words has = words_of(problem_text(p.at("problem")));
      if (!std::ranges::all_of(problem_words, [&](const std::string& w) {
            const bool without = w.starts_with('-');
            return (std::ranges::find(has, without ? w.substr(1) : w) == has.end()) == without;
          }))
        continue;
      for (const json& r : p.value("ratios", json::array()))
        if (is_step(r.at("step"), step) && r.at("peer") == peer) found.push_back(r.at("median"));
    }
    if (found.empty()) throw InputError(fmt::format("{} has no ratio of {} {}", name, step, peer));
    return found;
  }

  fs::path reports_;
  std::map<std::string, std::string> chapters_;
  std::map<std::string, json> documents_;
};

}  // namespace

ProseFigures check_prose(const fs::path& list, const fs::path& root, const fs::path& reports) {
  ProseFigures result;
  Figures figures(root, reports);
  std::istringstream lines(read(list));
  std::string page, text;
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.empty() || line[0] == '#') continue;
    if (line[0] != ' ') {
      page = line;
      text = one_line(read(root / page));
      continue;
    }
    std::string passage = one_line(line), said;
    try {
      for (std::size_t at = 0; at < passage.size();) {
        const std::size_t begin = passage.find('{', at), end = passage.find('}', begin);
        said += passage.substr(at, begin - at);
        if (begin == passage.npos) break;
        if (end == passage.npos) throw InputError("a brace is not closed");
        said += figures.figure(passage.substr(begin + 1, end - begin - 1));
        at = end + 1;
      }
    } catch (const std::exception& e) {
      throw InputError(fmt::format("{}:{}: {}", list.string(), number, e.what()));
    }
    ++result.passages;
    if (text.find(said) != text.npos) continue;
    result.missing.push_back(fmt::format("{}: must say: {}", page, said));
    // What stands where the words before the first figure do.
    const std::size_t words = passage.find('{'), at = text.find(passage.substr(0, words));
    if (words > 7 && words != passage.npos && at != text.npos)
      result.missing.back() += fmt::format("\n    it says: {}", text.substr(at, said.size()));
  }
  return result;
}

}  // namespace attn::report
