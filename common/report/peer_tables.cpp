// Tables of what peers.py found.
#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "report/table_kinds.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// A step's time is the median over the runs that took turns with the peers; 0 where it has none.
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

// Files of before peers.py said it hold forward problems.
std::string operation_of(const json& problem) { return problem.value("operation", std::string("forward")); }
std::string name_of(const json& j) { return j.at("name").get<std::string>(); }

std::string versions(const json& j) {
  return fmt::format("{}, PyTorch {}, cuDNN {}", j.at("gpu").get<std::string>(), j.at("torch").get<std::string>(),
                     j.at("cudnn").get<int>());
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

}  // namespace

std::string peers_table(const fs::path& path) {
  const json j = read_json(path);
  Grid grid;
  for (const json& p : j.at("problems")) {
    grid.add_row();
    grid.add("problem", "problem", problem_text(p.at("problem"), operation_of(p)));
    for (const json& peer : p.at("peers"))
      grid.add(name_of(peer), fmt::format("{} ms", name_of(peer)),
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
  return fmt::format("{}; `x name`: how many times faster than that peer.\n\n{}", versions(j), grid.markdown());
}

std::string ratios_table(const fs::path& folder, const Words& words) {
  Words names, steps, peers;
  for (const std::string& word : words) {
    if (word.starts_with("step="))
      steps = split(word.substr(5));
    else if (word.starts_with("peers="))
      peers = split(word.substr(6));
    else if (word.find('=') != word.npos)
      throw InputError(fmt::format("table ratios: {}: must be a file, step=NAME or peers=NAME,NAME", word));
    else
      names.push_back(word);
  }
  if (names.empty()) throw InputError("table ratios: needs a file of peers.py");
  Grid grid;
  std::string head;
  bool bytes = false, found = false;
  for (const std::string& name : names) {
    const json j = read_json(folder / (name + ".json"));
    if (head.empty()) head = versions(j);
    if (versions(j) != head)
      throw InputError(fmt::format("table ratios: {} is of {}, not of {}", name, versions(j), head));
    for (const json& p : j.at("problems")) {
      const json& run = p.at("runs").at(0);
      for (const json& s : run.at("steps")) {
        const std::string step = name_of(s);
        if (!wanted(steps, step)) continue;
        grid.add_row();
        grid.add("problem", "problem",
                 (operation_of(p) == "forward" ? "" : operation_of(p) + " ") +
                     problem_text(p.at("problem"), operation_of(p)));
        if (steps.size() != 1) grid.add("step", "step", code(step));
        // A refused step has its row, and no figure in it.
        const double median = median_of(p, step);
        if (median > 0 && rated_in_bytes(s)) {
          const double per_s = s.at("modelled_bytes").get<double>() / median, copy = measured_copy(run.at("roofs"));
          bytes = true;
          grid.add("GB/s", "GB/s", gigabytes_per_s(per_s));
          grid.add("copy", "% of copy", copy > 0 ? fmt::format("{:.1f}", 100 * per_s / copy) : "n/a");
        } else if (median > 0) {
          grid.add("TFLOP/s", "TFLOP/s", rate(s.at("flop").get<double>() / median));
        }
        for (const json& peer : p.at("peers"))  // also one without a ratio: its column shows that
          if (wanted(peers, name_of(peer))) grid.add_column(name_of(peer), fmt::format("x {}", name_of(peer)));
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
  if (!found) throw InputError(fmt::format("table ratios {}: has no such ratio", fmt::join(words, " ")));
  return fmt::format("{}{}; `x name`: how many times faster than that peer, median and quartiles of the rounds.{}\n\n{}",
                     head, steps.size() == 1 ? fmt::format(", {}", code(steps[0])) : "",
                     bytes ? " GB/s: modelled bytes over time." : "", grid.markdown());
}

}  // namespace attn::report
