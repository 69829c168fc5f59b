// Tables of peers.py results.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <string>
#include <tuple>

#include "report/table_kinds.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// A step's time is the median over its runs, which alternate with the peers; 0 if it has none.
double median_of(const json& problem, const std::string& step) {
  std::vector<double> medians;
  for (const json& run : problem.at("runs"))
    for (const json& s : run.at("steps"))
      if (s.at("name") == step && !s.at("time").is_null())
        medians.push_back(s.at("time").at("median_s").get<double>());
  if (medians.empty()) return 0;
  std::sort(medians.begin(), medians.end());
  return medians[(medians.size() - 1) / 2];
}

// Files from before peers.py recorded it hold forward problems.
std::string operation_of(const json& problem) {
  return problem.value("operation", std::string("forward"));
}
std::string name_of(const json& j) { return j.at("name").get<std::string>(); }
// What a peer is called above a column: where steps take e4m3, with its own type.
std::string title_of(const json& problem, const std::string& peer) {
  static const std::map<std::string, std::string> titles = {
      {"fa3_e4m3", "FA3 e4m3, cast before"},
      {"fa3_e4m3_casts", "FA3 e4m3, with casts"},
      {"fa3", "FA3 bf16"},
      {"cudnn", "cuDNN bf16"},
      {"sage_per_warp", "SageAttention2 per warp"}};
  const auto title = titles.find(peer);
  return problem.at("problem").value("dtype", "") == "e4m3" && title != titles.end()
             ? title->second
             : peer;
}

std::string versions(const json& j) {
  std::string text = fmt::format("{}, PyTorch {}, cuDNN {}", j.at("gpu").get<std::string>(),
                                 j.at("torch").get<std::string>(), j.at("cudnn").get<int>());
  const json packages = j.value("packages", json::object());
  for (const auto& [package, version] : packages.items())
    text += fmt::format(", {} {}", package, version.get<std::string>());
  return text;
}

// The rate of a read-only kernel. Roofs are measured once per file; other runs have datasheet
// roofs.
double measured_read(const json& file) {
  for (const json& p : file.at("problems")) {
    const json& read = p.at("runs").at(0).at("roofs").at("hbm_read");
    if (!read.is_null() && read.at("source") == "measured")
      return read.at("per_second").get<double>();
  }
  return 0;
}

Words split(const std::string& text) {
  Words words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, ',');) words.push_back(word);
  return words;
}
bool wanted(const Words& words, const std::string& word) {
  return words.empty() || std::find(words.begin(), words.end(), word) != words.end();
}

// "FILE ... step=NAME,NAME peers=NAME,NAME over=STEP". `over`: a step of the same document,
// compared by the medians of both.
struct Wish {
  Words names, steps, peers;
  std::string over;
};
Wish wish_of(const std::string& kind, const Words& words) {
  Wish w;
  for (const std::string& word : words) {
    if (word.starts_with("step="))
      w.steps = split(word.substr(5));
    else if (word.starts_with("peers="))
      w.peers = split(word.substr(6));
    else if (word.starts_with("over="))
      w.over = word.substr(5);
    else if (word.find('=') != word.npos)
      throw InputError(
          fmt::format("table {}: {}: must be a file, step=NAME, peers=NAME,NAME or over=STEP", kind,
                      word));
    else
      w.names.push_back(word);
  }
  if (w.names.empty()) throw InputError(fmt::format("table {}: needs a file of peers.py", kind));
  return w;
}

}  // namespace

std::string peers_table(const fs::path& path) {
  const json j = read_json(path);
  Grid grid;
  for (const json& p : j.at("problems")) {
    grid.add_row();
    grid.add("problem", "problem", problem_text(p.at("problem")));
    for (const json& peer : p.at("peers"))
      grid.add(
          name_of(peer), fmt::format("{} ms", name_of(peer)),
          peer.contains("time") ? milliseconds(peer.at("time").at("median_s").get<double>()) : "-");
    for (const json& s : p.at("runs").at(0).at("steps")) {
      const std::string step = name_of(s);
      const double median = median_of(p, step);
      if (median == 0) continue;
      grid.add(step, fmt::format("{} ms", code(step)), milliseconds(median));
      for (const json& peer : p.at("peers"))
        grid.add(step + " " + name_of(peer), fmt::format("x {}", name_of(peer)),
                 peer.contains("time")
                     ? fmt::format("{:.2f}", peer.at("time").at("median_s").get<double>() / median)
                     : "-");
    }
  }
  return fmt::format("{}; `x name`: how many times faster than that peer.\n\n{}", versions(j),
                     grid.markdown());
}

std::string ratios_table(const fs::path& folder, const Words& words) {
  const auto [names, steps, peers, over] = wish_of("ratios", words);
  Grid grid;
  std::string head;
  bool bytes = false, found = false;
  for (const std::string& name : names) {
    const json j = read_json(folder / (name + ".json"));
    if (head.empty()) head = versions(j);
    if (versions(j) != head)
      throw InputError(
          fmt::format("table ratios: {} is of {}, not of {}", name, versions(j), head));
    for (const json& p : j.at("problems")) {
      const json& run = p.at("runs").at(0);
      for (const json& s : run.at("steps")) {
        const std::string step = name_of(s);
        if (!wanted(steps, step)) continue;
        grid.add_row();
        grid.add("problem", "problem",
                 (operation_of(p) == "forward" ? "" : operation_of(p) + " ") +
                     problem_text(p.at("problem")));
        if (steps.size() != 1) grid.add("step", "step", code(step));
        // A refused step has a row without figures.
        const double median = median_of(p, step);
        if (median > 0 && rated_by_use(s)) {
          grid.add("use", "GB/s of use", useful_rate(s, median));
          const double read = measured_read(j), bytes_used = s.at("compulsory_bytes").get<double>();
          const double share = read > 0 ? bytes_used / median / read : 0;
          grid.add("read", "% of read", read > 0 ? fmt::format("{:.1f}", 100 * share) : "n/a");
        } else if (median > 0 && rated_in_bytes(s)) {
          const double per_s = s.at("modelled_bytes").get<double>() / median,
                       copy = measured_copy(run.at("roofs"));
          bytes = true;
          grid.add("GB/s", "GB/s", gigabytes_per_s(per_s));
          grid.add("copy", "% of copy",
                   copy > 0 ? fmt::format("{:.1f}", 100 * per_s / copy) : "n/a");
        } else if (median > 0) {
          grid.add("TFLOP/s", "TFLOP/s", rate(s.at("flop").get<double>() / median));
        }
        if (!over.empty() && median > 0) {
          const double other = median_of(p, over);
          if (other == 0) throw InputError(fmt::format("over={}: {} has none", over, name));
          grid.add("over", "x " + code(over), fmt::format("{:.2f}", other / median));
        }
        for (const json& peer : p.at("peers"))  // includes peers without a ratio, to show that
          if (wanted(peers, name_of(peer)))
            grid.add_column(name_of(peer), "x " + title_of(p, name_of(peer)));
        for (const json& r : p.value("ratios", json::array())) {
          const auto peer = r.at("peer").get<std::string>();
          if (r.at("step") != step || !wanted(peers, peer)) continue;
          found = true;
          grid.put(peer, fmt::format("{:.2f} ({:.2f} .. {:.2f})", r.at("median").get<double>(),
                                     r.at("q1").get<double>(), r.at("q3").get<double>()));
        }
      }
    }
  }
  if (!found)
    throw InputError(fmt::format("table ratios {}: has no such ratio", fmt::join(words, " ")));
  return fmt::format(
      "{}{}; `x name`: how many times faster than that peer, median and quartiles of the "
      "rounds{}.{}\n\n{}",
      head, steps.size() == 1 ? fmt::format(", {}", code(steps[0])) : "",
      over.empty() ? "" : "; of steps the ratio of the medians",
      bytes ? " GB/s: modelled bytes over time." : "", grid.markdown());
}

std::string means_table(const fs::path& folder, const Words& words) {
  const Wish wish = wish_of("means", words);
  if (wish.steps.empty()) throw InputError("table means: needs step=NAME");
  if (!wish.over.empty()) throw InputError("table means: has no over=");
  struct Mean {
    Words lengths;
    std::map<std::string, std::vector<double>> ratios;  // by peer
  };
  // by head dim, everything else except the length, and step
  std::map<std::tuple<int64_t, std::string, std::string>, Mean> means;
  Words peers;
  std::string head;
  for (const std::string& name : wish.names) {
    const json j = read_json(folder / (name + ".json"));
    head = versions(j);
    for (const json& p : j.at("problems")) {
      const json& problem = p.at("problem");
      const std::string operation = operation_of(p);
      for (const std::string& step : wish.steps) {
        const auto of_step = [&](const json& r) { return r.at("step") == step; };
        if (wish.steps.size() > 1 && std::ranges::none_of(p.at("ratios"), of_step)) continue;
        const std::string causal = problem.at("causal").get<bool>() ? ", causal" : "";
        Mean& mean = means[{problem.at("head_dim").get<int64_t>(), operation + causal, step}];
        mean.lengths.push_back(std::to_string(problem.at("seqlen_k").get<int64_t>()));
        for (const json& r : p.at("ratios")) {
          const auto peer = r.at("peer").get<std::string>();
          if (!of_step(r) || !wanted(wish.peers, peer)) continue;
          mean.ratios[peer].push_back(r.at("median").get<double>());
          if (std::ranges::find(peers, peer) == peers.end()) peers.push_back(peer);
        }
      }
    }
  }
  if (peers.empty())
    throw InputError(fmt::format("table means {}: has no such ratio", fmt::join(words, " ")));
  Grid grid;
  for (const auto& [group, mean] : means) {
    grid.add_row();
    grid.add("d", "d", std::to_string(std::get<0>(group)));
    grid.add("what", "operation", std::get<1>(group));
    if (wish.steps.size() > 1) grid.add("step", "step", code(std::get<2>(group)));
    grid.add("N", "lengths", fmt::format("{}", fmt::join(mean.lengths, ", ")));
    for (const std::string& peer : peers) {
      grid.add_column(peer, fmt::format("x {}", peer));
      const auto found = mean.ratios.find(peer);
      if (found == mean.ratios.end()) continue;
      double logs = 0;
      for (const double r : found->second) logs += std::log(r);
      const auto [least, most] = std::ranges::minmax(found->second);
      const auto count = static_cast<double>(found->second.size());
      // Lengths that the peer or the step does not support are marked.
      grid.put(peer, fmt::format("{:.2f} ({:.2f} .. {:.2f}){}", std::exp(logs / count), least, most,
                                 found->second.size() == mean.lengths.size()
                                     ? ""
                                     : fmt::format(" of {} lengths", found->second.size())));
    }
  }
  return fmt::format(
      "{}{}; `x name`: how many times faster than that peer, geometric mean over the lengths named "
      "(least and most).\n\n{}",
      head, wish.steps.size() == 1 ? fmt::format(", {}", code(wish.steps[0])) : "",
      grid.markdown());
}

}  // namespace attn::report
