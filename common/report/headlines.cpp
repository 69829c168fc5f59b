// Headlines: the speedup of a step over its peers, one row each; and third-party measurements next
// to those of peers.py.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "report/code_keys.h"
#include "report/table_kinds.h"
#include "report/table_text.h"

namespace attn::report {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

// The ratios of one file, from peers.py or third parties.
struct Ratios {
  std::string card, source;
  std::size_t problems = 0;
  std::map<std::string, std::string> titles;  // of peers
  // by step, then by peer, one for each problem that has it
  std::map<std::string, std::map<std::string, std::vector<double>>> by_step;
};

bool is_others(const json& j) { return j.value("schema", "") == "attn-others-1"; }

Ratios read_ratios(const fs::path& folder, const std::string& name) {
  const json j = read_json(folder / (name + ".json"));
  Ratios r;
  r.card = j.at("gpu").get<std::string>();
  if (is_others(j)) {
    r.source = fmt::format("others, {}", j.at("date").get<std::string>());
    r.titles = j.at("peers").get<std::map<std::string, std::string>>();
    r.problems = j.at("rows").size();
    for (const json& row : j.at("rows"))
      for (const auto& [step, peers] : row.at("ratio").items())
        for (const auto& [peer, ratio] : peers.items())
          if (ratio.is_number()) r.by_step[step][peer].push_back(ratio.get<double>());
    return r;
  }
  r.source = by_peers_formats(name) ? "`peers_formats.py`" : "`peers.py`";
  r.titles = {{"flash", "FlashAttention-2 (PyTorch), called"},
              {"flash graph", "FlashAttention-2 (PyTorch), as a graph"},
              {"cudnn", "cuDNN, called"},
              {"cudnn graph", "cuDNN, as a graph"},
              {"flex", "FlexAttention (PyTorch), called"},
              {"fa3", "FlashAttention-3, called"},
              {"fa3 graph", "FlashAttention-3, as a graph"},
              {"fa3_pages", "FlashAttention-3 on pages, called"},
              {"fa3_pages graph", "FlashAttention-3 on pages, as a graph"},
              {"fa3_e4m3", "FlashAttention-3 in e4m3, cast before"},
              {"fa3_e4m3_casts", "FlashAttention-3 in e4m3, with casts"},
              {"sage_per_warp", "SageAttention2, per warp"}};
  if (j.at("problems").at(0).at("problem").value("dtype", "") == "e4m3")  // of the steps
    r.titles["fa3"] = "FlashAttention-3 in bf16", r.titles["cudnn"] = "cuDNN in bf16";
  r.problems = j.at("problems").size();
  for (const json& p : j.at("problems"))
    for (const json& ratio : p.value("ratios", json::array()))
      r.by_step[ratio.at("step").get<std::string>()][ratio.at("peer").get<std::string>()].push_back(
          ratio.at("median").get<double>());
  return r;
}

double geometric_mean(const std::vector<double>& values) {
  double logs = 0;
  for (const double x : values) logs += std::log(x);
  return std::exp(logs / static_cast<double>(values.size()));
}

// Parses "Decode=peers.05_flash_decoding:v13_even_splits:cudnn,cudnn_graph"; underscores stand for
// blanks, in the label and before "graph".
struct Spec {
  std::string label, file, step;
  Words peers;
};
Spec spec_of(const std::string& word) {
  const auto equals = word.find('=');
  const Words parts = split(equals == word.npos ? word : word.substr(equals + 1), ':');
  if (equals == word.npos || parts.size() != 3)
    throw InputError(
        fmt::format("table headline: {}: must be LABEL=FILE:STEP:PEER,PEER, _ for a blank", word));
  Spec s{word.substr(0, equals), parts[0], parts[1], split(parts[2], ',')};
  std::ranges::replace(s.label, '_', ' ');
  return s;
}

std::string title_of(const Ratios& r, const std::string& peer) {
  const auto title = r.titles.find(peer);
  return title == r.titles.end() ? peer : title->second;
}

}  // namespace

Words headline_files(const Words& specs) {
  Words files;
  for (const std::string& word : specs)
    if (const std::string file = spec_of(word).file; std::ranges::find(files, file) == files.end())
      files.push_back(file);
  return files;
}

std::string headline_table(const fs::path& folder, const Words& specs) {
  Grid grid;
  for (const std::string& word : specs) {
    const Spec s = spec_of(word);
    const Ratios r = read_ratios(folder, s.file);
    const auto step = r.by_step.find(s.step);
    if (step == r.by_step.end())
      throw InputError(fmt::format("table headline: {} has no ratio of {}", s.file, s.step));
    const auto weaker = [](const auto& a, const auto& b) {
      return geometric_mean(a.second) < geometric_mean(b.second);
    };
    const std::string strongest =
        std::min_element(step->second.begin(), step->second.end(), weaker)->first;
    bool named = false;
    for (std::string peer : s.peers) {
      if (!step->second.contains(peer) && peer.ends_with("_graph"))
        peer[peer.rfind('_')] = ' ';
      const auto found = step->second.find(peer);
      if (found == step->second.end())
        throw InputError(
            fmt::format("table headline: {}: {} has no peer {}", s.file, s.step, peer));
      named |= peer == strongest;
      const std::vector<double>& ratios = found->second;
      const auto [least, most] = std::ranges::minmax(ratios);
      grid.add_row();
      grid.add("what", "what", s.label);
      grid.add("step", "step", code(s.step));
      grid.add("peer", "compared with", title_of(r, peer));
      grid.add("mean", "times as fast", fmt::format("{:.2f}", geometric_mean(ratios)));
      grid.add("range", "least to most", fmt::format("{:.2f} to {:.2f}", least, most));
      grid.add("points", "problems",
               ratios.size() == r.problems ? std::to_string(r.problems)
                                           : fmt::format("{} of {}", ratios.size(), r.problems));
      grid.add("card", "card", r.card);
      grid.add("source", "measured by", r.source);
    }
    if (!named)
      throw InputError(fmt::format("table headline: {}: leaves out the strongest peer of {}: {}",
                                   s.file, s.step, strongest));
  }
  return "Times as fast: the peer's time over ours, geometric mean over all problems of the file; "
         "below 1 ours is slower.\n\n" +
         grid.markdown();
}

std::string others_table(const fs::path& folder, const Words& words) {
  Words names, steps, peers, ratios;
  for (const std::string& word : words)
    if (word.starts_with("step="))
      steps = split(word.substr(5), ',');
    else if (word.starts_with("peers="))
      peers = split(word.substr(6), ',');
    else if (word.starts_with("ratios="))
      ratios = split(word.substr(7), ',');
    else
      names.push_back(word);
  if (names.size() != 1) throw InputError("table others: needs one file of others");
  const json j = read_json(folder / (names[0] + ".json"));
  if (!is_others(j)) throw InputError(fmt::format("table others: {} is of our scripts", names[0]));
  if (ratios.empty()) ratios = peers;
  const Ratios r = read_ratios(folder, names[0]);
  const auto wanted = [](const Words& list, const std::string& word) {
    return list.empty() || std::ranges::find(list, word) != list.end();
  };
  Grid grid;
  for (const json& row : j.at("rows")) {
    grid.add_row();
    const std::string problem = row.at("name").get<std::string>();
    grid.add("problem", "problem", problem.substr(problem.find(' ') + 1));
    const json& times = row.at("us");
    for (const bool ours : {false, true})
      for (const auto& [name, us] : times.items())
        if (r.by_step.contains(name) == ours && wanted(ours ? steps : peers, name) &&
            us.is_number())
          grid.add(name, fmt::format("{} us", ours ? code(name) : title_of(r, name)),
                   fmt::format("{:.1f}", us.get<double>()));
    for (const auto& [step, by_peer] : row.at("ratio").items())
      for (const auto& [peer, ratio] : by_peer.items())
        if (wanted(steps, step) && wanted(ratios, peer) && ratio.is_number())
          grid.add(step + " " + peer,
                   fmt::format("{} x {}", code(step.substr(0, step.find('_'))), title_of(r, peer)),
                   fmt::format("{:.2f}", ratio.get<double>()));
  }
  std::string means;
  for (const auto& [step, by_peer] : r.by_step)
    for (const auto& [peer, values] : by_peer)
      if (wanted(steps, step) && wanted(ratios, peer)) {
        const auto [least, most] = std::ranges::minmax(values);
        means += fmt::format("{}{} x {}: {:.2f} ({:.2f} to {:.2f})", means.empty() ? "" : "; ",
                             code(step.substr(0, step.find('_'))), title_of(r, peer),
                             geometric_mean(values), least, most);
      }
  return fmt::format(
      "{}, measured on {} at commit {}, not by this repository's scripts: method and versions are "
      "in `{}.jsonl`. {}. `x name`: how many times faster than that.\n\n{}\nGeometric means (least "
      "to most): {}.\n",
      r.card, j.at("date").get<std::string>(), j.at("commit").get<std::string>(),
      fs::path(names[0]).filename().string(), j.at("problems").get<std::string>(), grid.markdown(),
      means);
}

}  // namespace attn::report
